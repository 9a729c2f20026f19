"""Draws tokens with noise that follows from a request's seed, the position of the token and the token's id alone.

The token with the greatest sum of logit and Gumbel noise is distributed as the softmax of the logits says (the
Gumbel-max trick, Maddison et al., 2014). A search in cumulative sums would give the neighbour of a token for a slightly
different logit of any other token, and logits in bfloat16 depend on the rest of the batch. Here every token keeps its
noise, and rounding changes the choice only if two sums are nearly equal.

The generator has no state: it is the output function of SplitMix64 (Steele et al., 2014), applied to a counter.
"""

from __future__ import annotations

import numpy as np
import torch

from handlers.rolling_batch.device_arrays import upload

_INCREMENT = 0x9E3779B97F4A7C15  # 2 ** 64 divided by the golden ratio, as in SplitMix64
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def stream_of(seed: int) -> int:
    """Return the key of a seed, from which its positions' keys follow."""
    return _mix(seed & _MASK)


def key_of(stream: int, position: int) -> int:
    """Return the key of a position, from which the noise of each token follows."""
    return _mix((stream + (position + 1) * _INCREMENT) & _MASK)


def keys_of(streams: list[int], positions: list[int]) -> np.ndarray:
    """Return the key of each stream's position, as uint64."""
    steps = np.array(positions, np.uint64) + np.uint64(1)
    words = np.array(streams, np.uint64) + steps * np.uint64(_INCREMENT)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FACTORS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_FACTORS[1])
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed


def draw(logits: torch.Tensor, ids: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """Return for each row of float32 logits the column that its softmax and the row's key (uint64) draw.

    `ids` are the tokens of the columns.
    """
    if logits.device.type == "cpu":
        return _draw_by_kernel(logits, ids, keys)
    return (logits + noise(upload(keys.view(np.int64), logits.device), ids)).argmax(dim=-1)


def _draw_by_kernel(logits: torch.Tensor, ids: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    from handlers.cpu_kernels.rows import draw_columns

    drawn = np.empty(len(logits), np.int64)
    draw_columns(logits.numpy(), ids.numpy(), keys, drawn)
    return torch.from_numpy(drawn)


def noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise for `ids` (rows, columns) with int64 `keys` (rows,), the same as that of the kernels."""
    bits = _shifted(_mixed(keys[:, None] + ids * _signed(_INCREMENT)), 33)
    uniform = (bits.float() + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(_FACTORS[0])
    words = (words ^ _shifted(words, 27)) * _signed(_FACTORS[1])
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 as if they were unsigned, which torch computes little with."""
    return (words >> count) & (2 ** (64 - count) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FACTORS[0]) & _MASK
    word = ((word ^ (word >> 27)) * _FACTORS[1]) & _MASK
    return word ^ (word >> 31)

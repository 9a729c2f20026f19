"""Gives each row of a flat pass the rotary embeddings for the length of its own text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from handlers.checkpoints.rotary import RotaryEmbeddings, steady_length
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError


class RowFrequencies:
    """Calls the rotary embeddings of a model once for each length among the rows of a pass.

    The modules choose frequencies by the last position that they are given. So each call gets one more position, that
    of the last token of a text of the length. `length` is the border: shorter texts have the same frequencies.
    """

    def __init__(self, model: Any, length: int) -> None:
        self.length = length
        kinds = str(model.config.get_text_config().to_dict().get("rope_parameters"))
        self.is_step = "longrope" in kinds
        self.recomputes = "original_max_position_embeddings" in inspect.getsource(model.prepare_inputs_for_generation)
        self._embeddings = RotaryEmbeddings(model)
        self._lengths: list[int] = []
        for module in model.modules():
            if hasattr(module, "max_seq_len_cached"):
                module.forward = functools.partial(self._by_rows, module.forward)

    @classmethod
    def from_model(cls, model: Any, max_len: int) -> RowFrequencies | None:
        """Return them for a model whose frequencies change within `max_len` tokens; None for any other."""
        steady = steady_length(model.config.get_text_config().to_dict())
        return None if steady is None or max_len <= steady else cls(model, steady)

    def begin(self, lengths: Sequence[int]) -> None:
        """Set the lengths of the texts of the rows of the next pass; rows behind them are padding."""
        self._lengths = list(lengths)

    def _by_rows(self, forward: Any, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        """Return cosines and sines, each (1, rows, dim), for positions (1, rows)."""
        rows = position_ids.shape[-1]
        lengths = [*self._lengths, *[0] * rows][:rows]
        counted = [max(length, self.length) for length in lengths]
        if self.is_step:
            counted = [min(length, self.length + 1) for length in counted]
        rows_of: dict[int, list[int]] = {}
        for row, length in enumerate(counted):
            rows_of.setdefault(length, []).append(row)
        found: list[torch.Tensor] = []
        for length, own in rows_of.items():
            index = torch.tensor(own, device=position_ids.device)
            last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
            self._embeddings.forget()
            parts = forward(x, torch.cat((position_ids[..., index], last), -1), *more, **named)
            if not found:
                found = [part.new_zeros((*part.shape[:-2], rows, part.shape[-1])) for part in parts]
            for whole, part in zip(found, parts, strict=True):
                whole[..., index, :] = part[..., :-1, :]
        return tuple(found)


def refuse_unsteady_rope(config: Any, max_len: int) -> None:
    """Refuse rotary embeddings that change with the longest position of a pass.

    With them the output of a request would depend on the other requests in the batch. Raises UnsupportedAttentionError
    naming the length up to which they are constant.
    """
    steady = steady_length(config.get_text_config().to_dict())
    if steady is not None and max_len > steady:
        raise UnsupportedAttentionError(
            f"its rotary embeddings change with the length; set option.max_model_len={steady}"
        )

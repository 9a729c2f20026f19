"""How far logits are from expected ones, and whether a model tells tokens apart at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmi_server.contract.errors import ModelLoadError

if TYPE_CHECKING:
    import torch


def relative_error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far logits are off, as a share of the spread of the expected ones.

    Without a spread, as where a model has a single label, it is a share of their size. NaN in either is NaN.
    """
    error = float((computed - expected).norm())
    scale = float((expected - expected.mean(dim=-1, keepdim=True)).norm()) or float(expected.norm())
    if scale:
        return error / scale
    return error * float("inf") if error else 0.0


def refuse_broken(logits: torch.Tensor, model: str) -> None:
    """Raise ModelLoadError if one is NaN, or if at each place all tokens have the same logit."""
    if bool(logits.isnan().any()):
        raise ModelLoadError(
            f"{model} as it was loaded computes NaN for random tokens: its weights are damaged, or too large for"
            " option.dtype; save or download the checkpoint again, or set option.dtype=fp32"
        )
    if bool((logits.amax(dim=-1) == logits.amin(dim=-1)).all()):
        raise ModelLoadError(
            f"{model} finds all tokens equally likely after random ones: its output layer, or the whole checkpoint, has"
            " only zeros; save or download the checkpoint again"
        )

"""Tensors as the arrays that kernels take."""

from __future__ import annotations

import numpy as np
import torch


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """View a CPU tensor as a numpy array; bfloat16, which numpy lacks, as its bits (uint16)."""
    array: np.ndarray = tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return array

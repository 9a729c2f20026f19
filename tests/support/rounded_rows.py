"""Rows of float32 in 8 bits, as kernels round them."""

from __future__ import annotations

import numpy as np


def rounded_numbers(rows: np.ndarray, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows (n, width) as numbers (n, scales, inputs) int64, with a scale for so many inputs (n, scales, 1)."""
    blocks = rows.reshape(len(rows), rows.shape[1] // inputs, inputs)
    greatest = np.maximum(np.abs(blocks).max(2, keepdims=True), np.float32(2.0**-100))
    return np.rint(blocks * (np.float32(127) / greatest)).astype(np.int64), greatest / np.float32(127)


def rounded(rows: np.ndarray) -> np.ndarray:
    """Return what 8 bits for each input, and a scale for each 32, make of rows; in float64."""
    numbers, scales = rounded_numbers(rows, 32)
    return (numbers.astype(np.float64) * scales).reshape(rows.shape)

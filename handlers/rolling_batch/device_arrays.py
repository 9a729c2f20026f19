"""Arrays of the host on their way to a device and back, without a wait for what the device computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(numbers: np.ndarray | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the numbers on `device`. On a GPU the copy is one more entry of its stream: the host goes on."""
    tensor = torch.from_numpy(numbers if isinstance(numbers, np.ndarray) else np.array(numbers, np.int64))
    if device.type == "cuda":  # from other memory the copy waits for what the GPU computes
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Download:
    """Tensors on their way to the host; `read` waits until they are there."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._arrived = list(tensors)
        if tensors and tensors[0].device.type == "cuda":
            self._arrived = [_pinned_like(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[torch.Tensor]:
        """Return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._arrived


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def unknown_token(row: int) -> int:
    """Return what stands for the token of `row` of the step before until the host knows it: a negative number."""
    return -1 - row


def known_tokens(ids: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return `ids` (any shape) with the tokens of the step before, (rows,), in place of those still unknown."""
    if before is None:
        return ids
    return torch.where(ids < 0, before.to(ids.device, non_blocking=True)[(-1 - ids).clamp_min(0)], ids)

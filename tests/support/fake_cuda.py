"""FakeCuda: what `torch.cuda` would say on a machine with GPUs, for tests on a machine without.

It answers questions (how many GPUs, which, how much memory) and computes nothing. Tensors on its GPUs are simulated
ones (simulated_devices.py) or on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

GIB = 2**30


@dataclass
class FakeCuda:
    """`memory` has free and total bytes of each GPU. `step_bytes` is what the next steps take, for each row."""

    memory: list[tuple[int, int]] = field(default_factory=lambda: [(14 * GIB, 16 * GIB)])
    capability: tuple[int, int] = (9, 0)
    version: str = "12.8"
    failure: str = ""
    architectures: tuple[str, ...] = ("sm_75", "sm_80", "sm_90a")
    current: Any = None
    step_bytes: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        """Put these answers in place of torch's."""
        monkeypatch.setattr(torch.version, "cuda", self.version or None)
        for name in (
            "is_available", "device_count", "get_device_capability", "get_arch_list", "mem_get_info", "empty_cache",
            "init", "set_device", "get_device_name", "memory_allocated", "max_memory_allocated",
            "reset_peak_memory_stats",
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        return self

    def is_available(self) -> bool:
        return bool(self.version) and not self.failure

    def device_count(self) -> int:
        return len(self.memory)  # like torch, which asks NVML and not the driver

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.capability

    def get_device_name(self, device: Any = None) -> str:
        return "Fake GPU"

    def get_arch_list(self) -> list[str]:
        return [*self.architectures, "compute_90"]

    def mem_get_info(self, device: Any = 0) -> tuple[int, int]:
        return self.memory[device if isinstance(device, int) else device.index or 0]

    def init(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure + "\nAdvice for developers")

    def set_device(self, device: Any) -> None:
        self.current = device

    def empty_cache(self) -> None:
        """Nothing is kept."""

    def reset_peak_memory_stats(self, device: Any) -> None:
        """Nothing is counted."""

    def memory_allocated(self, device: Any) -> int:
        return 0

    def max_memory_allocated(self, device: Any) -> int:
        return self.step_bytes

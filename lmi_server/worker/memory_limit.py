"""The memory of this process, and the message if it exceeds the limit of its model."""

from __future__ import annotations

import os
from pathlib import Path

_MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE


def excess(limit_mb: int) -> str | None:
    """Return how far this process is above `limit_mb` (0: no limit) MiB, in words; None if it is not."""
    if not limit_mb or (resident := resident_bytes()) <= limit_mb * _MIB:
        return None
    return f"the process takes {resident // _MIB} MiB, more than max_worker_memory_mb={limit_mb}; raise the limit"

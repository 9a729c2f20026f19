"""The machine's main memory, of which a container may have less."""

from __future__ import annotations

from pathlib import Path

_KIB = 1024


def free_and_total() -> tuple[int, int]:
    """Return free and total bytes of main memory; the limit of a control group (v2) counts."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(fields[name].split()[0]) * _KIB for name in ("MemAvailable", "MemTotal"))
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is None:
        return free, total
    return min(free, limit - (used or 0)), min(total, limit)


def _cgroup_bytes(name: str) -> int | None:
    """What the container's control group says; None where it says nothing or sets no limit."""
    file = Path("/sys/fs/cgroup") / name
    text = file.read_text().strip() if file.exists() else "max"
    return None if text == "max" else int(text)

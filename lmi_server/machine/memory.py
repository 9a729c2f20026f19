"""The main memory that this process may use: that of the machine, or less of it in a container."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_KIB = 1024
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Controller:
    """Where a version of control groups keeps its numbers."""

    mount: str
    limit: str
    used: str
    reclaimable: str  # a field of memory.stat
    events: str  # the file that counts OOM kills


_V1 = _Controller(
    "sys/fs/cgroup/memory",
    *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
)
_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "memory.events")


def free_and_total(root: Path = _ROOT) -> tuple[int, int]:
    """Return free and total bytes of main memory; (0, 0) if the system has no /proc/meminfo.

    Each control group (v1 or v2) around this process that has a limit bounds both. `root` is where /proc and /sys are.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():
        return 0, 0
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, total = (int(fields[name].split()[0]) * _KIB for name in ("MemAvailable", "MemTotal"))
    for limit, used in _limits(root):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return free, total


def oom_kills(root: Path = _ROOT) -> int:
    """Return how many processes the kernel has killed because memory ran out; 0 if that is unknown.

    They are the limits of the control group of this process, or without one the machine's.
    """
    with contextlib.suppress(OSError):  # no file descriptor is free
        return _oom_kills(root)
    return 0


def _oom_kills(root: Path) -> int:
    controller, group = _own_group(root)
    mount = root / controller.mount
    counters = [mount.joinpath(*below.parts[1:], controller.events) for below in (group, *group.parents)]
    counter = next((file for file in counters if file.is_file()), root / "proc/vmstat")
    lines = counter.read_text().splitlines() if counter.is_file() else ()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit, and the bytes in use, of each control group that bounds this process."""
    controller, group = _own_group(root)
    mount = root / controller.mount
    # A group is bounded by its own limit and by those of all groups above it. The path of a container's group is often
    # that on the host, while only its lower end is mounted here: the directories that are missing are skipped, and the
    # mount itself is then the container's group.
    for below in (group, *group.parents):
        directory = mount.joinpath(*below.parts[1:])
        limit = _number(directory / controller.limit)
        if limit is not None:
            yield limit, (_number(directory / controller.used) or 0) - _reclaimable(directory, controller)


def _own_group(root: Path) -> tuple[_Controller, PurePosixPath]:
    """Return the version of the memory controller, and the path of this process's group below its mount."""
    membership = root / "proc/self/cgroup"
    unified = PurePosixPath("/")
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _V1, PurePosixPath(path)
        if not controllers:  # v2 has one hierarchy for all controllers; with v1 beside it, it has none for memory
            unified = PurePosixPath(path)
    return _V2, unified


def _reclaimable(directory: Path, controller: _Controller) -> int:
    """Return the bytes of cached files that the kernel gives up before it runs short.

    Without this, a container that has just downloaded a model would seem to be full: its page cache counts as used.
    """
    stat = directory / "memory.stat"
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int(fields.get(controller.reclaimable, 0))


def _number(file: Path) -> int | None:
    """Return the number in `file`; None if there is no such file, or no limit ("max")."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None

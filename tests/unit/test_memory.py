from __future__ import annotations

from pathlib import Path

import pytest

from lmi_server.machine.memory import free_and_total, oom_kills

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Make a /proc and a /sys of a machine with 64 GiB, 48 of them free."""
    kib = GIB // 1024
    meminfo = f"MemTotal: {64 * kib} kB\nMemFree: {kib} kB\nMemAvailable: {48 * kib} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(path: str, limit: int, used: int, cached: int = 0) -> dict[str, str]:
    below = f"sys/fs/cgroup/memory{path}"
    return {
        f"{below}/memory.limit_in_bytes": f"{limit}\n",
        f"{below}/memory.usage_in_bytes": f"{used}\n",
        f"{below}/memory.stat": f"inactive_file 0\ntotal_inactive_file {cached}\n",
    }


def v2(path: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    below = f"sys/fs/cgroup{path}"
    return {
        f"{below}/memory.max": f"{limit}\n",
        f"{below}/memory.current": f"{used}\n",
        f"{below}/memory.stat": f"anon 1\ninactive_file {cached}\n",
    }


V1 = "4:memory:/docker/abc\n3:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "free", "total"),
    [
        ("", {}, 48, 64),
        ("0::/\n", {}, 48, 64),
        ("0::/\n", v2("", "max", 10 * GIB), 48, 64),
        ("0::/\n", v2("", 16 * GIB, 10 * GIB), 6, 16),
        ("0::/\n", v2("", 16 * GIB, 10 * GIB, cached=8 * GIB), 14, 16),
        ("0::/a.slice/b.service\n", v2("/a.slice/b.service", 16 * GIB, GIB) | v2("/a.slice", 8 * GIB, 3 * GIB), 5, 8),
        ("0::/a.slice/b.service\n", v2("/a.slice/b.service", "max", GIB) | v2("/a.slice", 8 * GIB, 3 * GIB), 5, 8),
        ("0::/on/the/host\n", v2("", 16 * GIB, 10 * GIB), 6, 16),
        ("0::/\n", v2("", 128 * GIB, GIB), 48, 64),
        ("0::/\n", v2("", 2 * GIB, 3 * GIB), 0, 2),
        (V1, v1("/docker/abc", 16 * GIB, 10 * GIB), 6, 16),
        (V1, v1("", 16 * GIB, 10 * GIB, cached=GIB), 7, 16),
        (V1, v1("", UNLIMITED_V1, 10 * GIB), 48, 64),
    ],
)
def test_limits_of_control_groups_count(
    tmp_path: Path, cgroup: str, files: dict[str, str], free: int, total: int
) -> None:
    assert free_and_total(machine(tmp_path, cgroup, files)) == (free * GIB, total * GIB)


def test_a_system_without_proc(tmp_path: Path) -> None:
    assert free_and_total(tmp_path) == (0, 0)


def test_this_machine() -> None:
    free, total = free_and_total()
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("", {}, 0),
        ("0::/\n", {"proc/vmstat": "allocstall 1\noom_kill 7\n"}, 7),
        ("0::/\n", {"sys/fs/cgroup/memory.events": "oom 3\noom_kill 2\n", "proc/vmstat": "oom_kill 7\n"}, 2),
        ("0::/on/the/host\n", {"sys/fs/cgroup/memory.events": "oom 3\noom_kill 2\n"}, 2),
        (V1, {"sys/fs/cgroup/memory/docker/abc/memory.oom_control": "under_oom 0\noom_kill 4\n"}, 4),
    ],
)
def test_oom_kills_are_those_of_the_control_group(
    tmp_path: Path, cgroup: str, files: dict[str, str], kills: int
) -> None:
    assert oom_kills(machine(tmp_path, cgroup, files)) == kills

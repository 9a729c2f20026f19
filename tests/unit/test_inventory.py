"""How many cores the server may use: what affinity, a container's quota and OMP_NUM_THREADS leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmi_server.machine import inventory
from lmi_server.machine.inventory import this_machine


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that stands for /sys/fs/cgroup, on a machine with eight cores."""
    monkeypatch.setattr(inventory, "_CONTAINER_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(inventory, "_OLD_QUOTA", [tmp_path / "cpu.cfs_quota_us", tmp_path / "cpu.cfs_period_us"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("5000 100000", 1), ("", 8)])
def test_a_quota_limits_the_cores_but_not_what_libraries_see(files: Path, quota: str, cores: int) -> None:
    (files / "cpu.max").write_text(f"{quota}\n")
    machine = this_machine({})
    assert (machine.cores, machine.seen_cores, machine.omp_threads) == (cores, 8, None)


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_the_first_version_of_control_groups(files: Path, quota: str, cores: int) -> None:
    (files / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (files / "cpu.cfs_period_us").write_text("100000\n")
    assert this_machine({}).cores == cores


def test_without_files_all_cores_count_and_omp_num_threads_limits_them(files: Path) -> None:
    assert this_machine({}).cores == 8
    limited = this_machine({"OMP_NUM_THREADS": "3"})
    assert (limited.cores, limited.omp_threads, limited.cpu_workers) == (3, 3, 2)

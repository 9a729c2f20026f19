"""A worker that is a group of ranks under a real mpirun: it starts, and nothing of it is left, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from mpi_helpers import SHARED_MEMORY, clean, group_members, litter, ranks_of
from processes import is_running
from server_helpers import Server, make_model, serving
from waiting import wait_until

pytestmark = pytest.mark.slow

RANKS = "rank_handlers:RankHandler"
MPI_KEYS = {"entryPoint": "djl_python.huggingface", "rolling_batch": "scheduler", "mpi_mode": "true"}


def model(directory: Path, ranks: int = 2, **options: object) -> Path:
    made = make_model(directory / "model", RANKS, **{**MPI_KEYS, "tensor_parallel_degree": ranks, **options})
    (made / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return made


def pid_of(directory: Path, rank: int) -> int:
    return int((directory / f"rank-{rank}").read_text().split()[0])


def wait_for_group(server: Server) -> None:
    server.log_line(r"\] ready: process")
    assert server.invoke("a b").status_code == 200


def left_by_another_server(lock: bool) -> Path:
    """Make the directory of a group of a server that is not of this machine's processes, an hour ago."""
    path = Path(tempfile.mkdtemp(prefix="lmi-999999999-", dir=SHARED_MEMORY))
    (path / "shared").touch()
    os.utime(path, (time.time() - 3600,) * 2)
    if lock:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)  # held until this process ends
    return path


def test_the_ranks_know_who_they_are_and_share_the_cores(tmp_path: Path) -> None:
    """What servers that were killed have left in shared memory is removed, what others use is not."""
    directory = model(tmp_path, 3)
    abandoned, in_use = left_by_another_server(lock=False), left_by_another_server(lock=True)
    with clean(directory) as server:
        wait_for_group(server)
        assert (abandoned.exists(), in_use.exists()) == (False, True)
        shutil.rmtree(in_use)
        written = [(directory / f"rank-{rank}").read_text().split()[1:] for rank in range(3)]
        threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert written == [[str(rank), str(rank), "3", "3", "127.0.0.1", threads] for rank in range(3)]
        members = group_members(server.process.pid)
        assert len(members) == 4
        assert len(litter(server.process.pid)) == 1
        log = "".join(server.lines)
        assert all(f"[model-0 rank {rank}] rank {rank} loads" in log for rank in range(3))
    assert not any(map(is_running, members))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_is_stopped_ends_the_group_and_the_next_one_serves(
    rank: int, number: int, tmp_path: Path
) -> None:
    directory = model(tmp_path)
    with clean(directory) as server:
        wait_for_group(server)
        first = group_members(server.process.pid)
        os.kill(pid_of(directory, rank), number)
        server.log_line(r"process \d+ (was ended|exited)")
        wait_for_group(server)
        assert not any(map(is_running, first))


def test_the_launcher_killed_or_stopped_takes_its_ranks_with_it(tmp_path: Path) -> None:
    directory = model(tmp_path)
    with clean(directory) as server:
        wait_for_group(server)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            first = group_members(server.process.pid)
            os.kill(server.worker_pid(), number)
            server.log_line(r"process \d+ was ended")
            wait_for_group(server)
            assert not any(map(is_running, first))


@pytest.mark.parametrize("fault", ["stop-0", "stop-1", "die-1"])
def test_a_rank_lost_while_it_loads_fails_the_load(fault: str, tmp_path: Path) -> None:
    directory = model(tmp_path)
    (directory / fault).touch()
    with clean(directory) as server:
        server.log_line("model model could not be loaded: the worker process")
        assert server.http.get("/ping").status_code == 500


def test_a_rank_stopped_before_it_has_connected_fails_the_load(tmp_path: Path) -> None:
    with clean(model(tmp_path)) as server:
        pid = server.process.pid
        wait_until(lambda: ranks_of(pid, 1), "the process of rank 1 is there")
        os.kill(ranks_of(pid, 1)[0], signal.SIGSTOP)
        server.log_line("is stopped by a signal; killing the worker")
        server.log_line("model model could not be loaded: the worker process was stopped")


def test_a_server_killed_leaves_no_rank_and_no_file(tmp_path: Path) -> None:
    directory = model(tmp_path)
    with clean(directory) as server:
        wait_for_group(server)
        members = group_members(server.process.pid)
        server.process.kill()
        server.ended()
        wait_until(lambda: not any(map(is_running, members)), "no rank is left")
        wait_until(lambda: not litter(server.process.pid), "no file is left")


def test_a_handler_that_cannot_follow_says_so(tmp_path: Path) -> None:
    options = {**MPI_KEYS, "tensor_parallel_degree": 2, "model_id": model(tmp_path / "other")}
    with serving(tmp_path, ready=False, **options) as server:
        found = server.log_line("could not be loaded: (.*)")
        assert "does not run under engine=MPI; set engine=Python" in found[1]

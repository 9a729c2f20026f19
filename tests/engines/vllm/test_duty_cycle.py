"""The compiler runs while no requests run, and a tenth of the time while they do. It never outlives its worker."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from threading import Event, Thread

import psutil
import pytest
from waiting import wait_until

from handlers.vllm.compilation.duty_cycle import DutyCycle, wait_while_pausing

# Stands for a worker (its first process) that waits for a compiler, which has started a compiler of its own.
_WORKER = """
import signal, subprocess, sys, threading
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
from handlers.vllm.compilation.duty_cycle import wait_while_pausing
code = "import subprocess; from lmi_server.processes.parents import end_group_with_parent; end_group_with_parent()\\n"
code += "subprocess.run(['sleep', '600'])"
compiler = subprocess.Popen([sys.executable, "-c", code], process_group=0)
while not sys.stdin.readline():
    pass
wait_while_pausing(compiler, lambda: True, threading.Event())
"""


def times(cycle: DutyCycle, seconds: range, busy: bool) -> list[bool]:
    return [cycle.may_run(second / 100, busy) for second in seconds]


def test_under_a_load_without_end_a_tenth_of_the_time_is_left() -> None:
    cycle = DutyCycle()
    assert all(times(cycle, range(100), False))
    found = times(cycle, range(100, 10_100), True)
    assert not any(found[:45])  # requests that come to an idle server are not slowed down at all
    assert sum(found) == pytest.approx(1000, rel=0.2)


def test_short_gaps_between_requests_are_not_idle() -> None:
    cycle = DutyCycle()
    found = [turn for begin in range(0, 4000, 40) for turn in (
        *times(cycle, range(begin, begin + 20), True), *times(cycle, range(begin + 20, begin + 40), False)
    )]  # fmt: skip
    assert sum(found) == pytest.approx(400, rel=0.2)
    after = times(cycle, range(4000, 4200), False)
    assert all(after[100:])


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"], process_group=0)
    yield process
    process.kill()
    process.wait()


def test_a_process_is_stopped_while_requests_run_and_killed_at_the_end(sleeper: subprocess.Popen[bytes]) -> None:
    busy, ended, codes = Event(), Event(), list[int]()
    waiting = Thread(target=lambda: codes.append(wait_while_pausing(sleeper, busy.is_set, ended)))
    waiting.start()
    seen = psutil.Process(sleeper.pid)
    busy.set()
    wait_until(lambda: seen.status() == psutil.STATUS_STOPPED, "the process is stopped")
    busy.clear()
    wait_until(lambda: seen.status() == psutil.STATUS_SLEEPING, "the process goes on")
    busy.set()
    wait_until(lambda: seen.status() == psutil.STATUS_STOPPED, "the process is stopped again")
    ended.set()
    waiting.join(60)
    assert codes == [-signal.SIGKILL]


def test_a_process_that_ends_by_itself_says_how() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], process_group=0)
    assert wait_while_pausing(process, lambda: True, Event()) == 3


@pytest.mark.parametrize("started_by", ["terminal", "nohup"])
def test_nothing_stopped_is_left_of_a_worker_that_dies(started_by: str) -> None:
    command = [sys.executable, "-c", _WORKER, started_by]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert worker.stdin is not None
    seen = psutil.Process(worker.pid)
    wait_until(lambda: len(seen.children(recursive=True)) == 2, "the compilers run")
    compilers = seen.children(recursive=True)
    worker.stdin.write(b"stop\n")
    worker.stdin.flush()

    def stopped() -> bool:
        return all(compiler.status() == psutil.STATUS_STOPPED for compiler in compilers)

    def is_caught_between_cycles() -> bool:
        """Stop the worker, so that the compilers get no turn until it is killed: one that runs goes on to its end."""
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: seen.status() == psutil.STATUS_STOPPED, "the worker is stopped")
        if stopped():
            return True
        worker.send_signal(signal.SIGCONT)
        return False

    wait_until(is_caught_between_cycles, "the compilers are stopped")
    worker.kill()
    worker.wait()
    worker.stdin.close()
    _, left = psutil.wait_procs(compilers, timeout=60)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []

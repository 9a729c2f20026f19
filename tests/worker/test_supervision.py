"""Workers that end in bad ways: their requests end soon, what they started goes with them, and the next one serves."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from own_code_helpers import make_own
from processes import is_running
from server_helpers import Server, running
from waiting import wait_until

CODE = """
import ctypes, multiprocessing, os, signal, subprocess, sys, time
from djl_python import Output

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]

LINK = os.readlink(f"/proc/self/fd/{sys.orig_argv[sys.orig_argv.index('--link') + 1].removeprefix('fd:')}")

def links():
    return [name for name in os.listdir("/proc/self/fd") if is_link(name)]

def is_link(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}") == LINK
    except OSError:
        return False

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def daemon():
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            time.sleep(3600)
        os.write(theirs, str(pid).encode())
        os._exit(0)
    os.wait()
    return int(os.read(ours, 20))

def count_links(pipe):
    pipe.send(len(links()))

def handle(inputs):
    if inputs.is_empty():
        return None
    match inputs.get_property("x-case"):
        case "pid":
            return Output().add(str(os.getpid()))
        case "raw fork and die":  # what C code does: Python's hooks do not run
            if ctypes.CDLL(None).fork() == 0:
                os.setsid()
                time.sleep(3600)
            die()
        case "setsid":
            return Output().add(str(subprocess.Popen(SLEEP, start_new_session=True).pid))
        case "clean setsid":
            return Output().add(str(subprocess.Popen(SLEEP, start_new_session=True, env={}).pid))
        case "daemon":
            return Output().add(str(daemon()))
        case "links in a fork":
            ours, theirs = os.pipe()
            if os.fork() == 0:
                os.write(theirs, str(len(links())).encode())
                os._exit(0)
            os.wait()
            return Output().add(os.read(ours, 20))
        case "links in a program":
            listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True).stdout
            return Output().add(str(listed.decode().count(LINK)))
        case "links in multiprocessing":
            ours, theirs = multiprocessing.get_context("fork").Pipe()
            process = multiprocessing.get_context("fork").Process(target=count_links, args=(theirs,))
            process.start()
            process.join()
            return Output().add(str(ours.recv()))
        case "die":
            print("the last words")
            die()
        case "take all memory":
            taken = [bytearray(os.urandom(1 << 20)) for _ in range(1000)]
    return Output().add("fine")
"""


left_behind: list[int] = []
"""Processes that must be gone once the server has ended."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    make_own(store / "bad", CODE, maxWorkers=1, predict_timeout=20, quarantine_time=0, retry_threshold=100)
    make_own(store / "careful", CODE, maxWorkers=1)
    make_own(store / "other", CODE, maxWorkers=1)
    with running("--model-store", str(store), libraries="", workers=3) as server:
        yield server
        server.stop()
        assert not [pid for pid in left_behind if is_running(pid)]


def ask(server: Server, case: str, model: str = "bad", **headers: str) -> httpx.Response:
    return server.http.post(f"/predictions/{model}", headers={"x-case": case, **headers})


@pytest.mark.slow
def test_a_child_that_keeps_the_link_open_does_not_hide_the_end(server: Server) -> None:
    began = time.monotonic()
    answer = ask(server, "raw fork and die")
    assert (answer.status_code, time.monotonic() - began < 15) == (503, True), answer.text
    assert ask(server, "").text == "fine"


@pytest.mark.parametrize("kind", ["a fork", "a program", "multiprocessing"])
def test_children_do_not_inherit_the_link(server: Server, kind: str) -> None:
    assert ask(server, f"links in {kind}").text == "0"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["setsid", "daemon"])
def test_processes_that_left_the_session_end_with_their_worker(server: Server, case: str) -> None:
    left, of_other = int(ask(server, case).text), int(ask(server, case, "other").text)
    left_behind.append(of_other)
    os.kill(int(ask(server, "pid").text), signal.SIGKILL)
    wait_until(lambda: not is_running(left), "the worker's process has ended")
    assert is_running(of_other)
    assert ask(server, "").text == "fine"


@pytest.mark.slow
def test_processes_without_the_environment_of_their_worker_end_with_the_server(server: Server) -> None:
    left_behind.append(int(ask(server, "clean setsid").text))
    os.kill(int(ask(server, "pid").text), signal.SIGKILL)
    assert ask(server, "").text == "fine"


def test_orphans_that_have_ended_are_collected(server: Server) -> None:
    orphan = int(ask(server, "daemon").text)
    os.kill(orphan, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{orphan}").exists(), "its parent has asked for its exit code")


@pytest.mark.slow
def test_the_pause_before_a_restart_does_not_grow_while_other_requests_are_served(server: Server) -> None:
    pauses = []
    for _ in range(4):
        assert ask(server, "die").status_code == 503
        pauses.append(server.log_line(r"\[bad-0\] restarting it in (\S+) seconds")[1])
        assert ask(server, "").text == "fine"
    assert pauses == ["0.1"] * 4


def test_a_crash_is_reported(server: Server) -> None:
    ask(server, "die", **{"x-request-id": "the-killer"})
    server.log_line(r"    the-killer on predictions, 0\.\d s after it was sent")
    report = server.lines[-3:]
    assert report[0].endswith("crash report: the worker process was ended by SIGKILL\n")
    assert report[1].strip() == "requests inside: 1"
    server.log_line("last lines of its log:")
    server.log_line("    the last words")


CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def little_memory(server: Server) -> Iterator[None]:
    """Put the server into a control group with 200 MiB for what it starts from now on."""
    group = CGROUPS / f"lmi-server-{server.process.pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError:
        pytest.skip("needs to make control groups of version 1")
    before = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    (group / "cgroup.procs").write_text(str(server.process.pid))
    yield
    outside = CGROUPS / before.rpartition(":")[2].lstrip("/") / "cgroup.procs"
    for pid in (group / "cgroup.procs").read_text().split():
        outside.write_text(pid)
    group.rmdir()


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
def test_a_worker_that_the_kernel_ended_for_its_memory_answers_507(server: Server, tmp_path: Path) -> None:
    make_own(tmp_path / "greedy", CODE, maxWorkers=1)
    assert server.http.post("/models", params={"url": str(tmp_path / "greedy")}).status_code == 200
    answer = ask(server, "take all memory", "greedy")
    assert (answer.status_code, answer.json()["type"]) == (507, "WlmOutOfMemoryException"), answer.text
    server.log_line("crash report: .* because the machine or its container ran out of memory")
    assert ask(server, "", "greedy").text == "fine"
    assert server.http.delete("/models/greedy").status_code == 200


@pytest.mark.slow
def test_a_request_that_ended_its_worker_twice_is_quarantined(server: Server) -> None:
    for _ in range(2):
        assert ask(server, "die", "careful").status_code == 503
    server.log_line("has ended its worker twice; it is quarantined")
    refused = ask(server, "die", "careful", **{"x-request-id": "another"})
    assert (refused.status_code, refused.json()["type"]) == (422, "RequestQuarantinedException")
    assert re.fullmatch(
        r"The request is refused for \d+ seconds, because it has ended its worker process 2 times "
        r"\(quarantine_time=600\); see the crash reports in the log",
        refused.json()["message"],
    )
    assert ask(server, "", "careful").text == "fine"

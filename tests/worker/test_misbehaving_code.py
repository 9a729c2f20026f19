"""A model.py that misbehaves: its client gets an error, and no other model is affected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from own_code_helpers import make_own
from server_helpers import Server, running
from waiting import wait_until

from lmi_server.contract.texts.quoting import LONGEST_MESSAGE

CODE = """
import os, signal, sys, time
from djl_python import Output

kept = []

class NamelessError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def handle(inputs):
    if inputs.is_empty():
        return None
    match inputs.get_property("x-case"):
        case "raise":
            raise ValueError("no such thing")
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            time.sleep(3600)  # here it hangs
        case "leak":
            kept.append(bytearray(os.urandom(1 << 20) * 400))
            time.sleep(3600)
        case "leak later":
            return Output().add("fine").finalize(lambda: kept.append(bytearray(os.urandom(1 << 20) * 400)))
        case "print":
            line = b"x" * 99 + b"\\n"
            for _ in range(1 << 9):
                os.write(1, line * 20_000)
            print("the last line")
        case "fork":
            if os.fork() == 0:
                return Output().add("the child's")
        case "fork and exit":
            if os.fork() == 0:
                sys.exit(1)
        case "signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        case "share memory":
            from multiprocessing import shared_memory
            kept.append(shared_memory.SharedMemory(inputs.get_property("x-name"), create=True, size=10))
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise what cannot be encoded":
            raise ValueError("a \\ud800 and \\0")
        case "raise without a text":
            raise NamelessError
        case "raise from itself":
            error = ValueError("a circle")
            raise error from error
        case "raise at length":
            raise ValueError("x" * 50_000_000)
        case "a code that is no integer":
            return Output(code=200.0).add("fine")
        case "a header that cannot be encoded":
            return Output().add("fine").add_property("x-name", "a \\ud800")
    return Output().add("fine")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    make_own(store / "bad", CODE, predict_timeout=3, maxWorkers=1)
    # Taking memory may last longer than the time limit of the other one.
    make_own(store / "greedy", CODE, max_worker_memory_mb=300, maxWorkers=1)
    make_own(store / "good", CODE)
    make_own(store / "loud", CODE)
    with running("--model-store", str(store), libraries="", workers=4) as server:
        yield server


def ask(server: Server, case: str, model: str = "bad") -> httpx.Response:
    return server.http.post(f"/predictions/{model}", headers={"x-case": case})


@pytest.fixture(autouse=True)
def _others_do_not_notice(server: Server) -> Iterator[None]:
    pid = ask_pid(server)
    yield
    assert ask(server, "", "good").text == "fine"
    assert ask_pid(server) == pid, "the other model's worker is the same"
    assert ask(server, "").text == "fine", "the worker is back"


def ask_pid(server: Server) -> object:
    (described,) = server.http.get("/models/good").json()
    return described["models"][0]["workerGroups"][0]["workers"][0]["startTime"]


def test_it_raises(server: Server) -> None:
    assert ask(server, "raise").json() == {
        "code": 424,
        "message": "invoke handler failure",
        "error": "no such thing",
    }
    server.log_line(r"\[bad-0\] .*request \S+: model\.py:16: ValueError: no such thing")


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("exit", r"\[bad-0\] process \d+ exited with code 7"),
        ("sys.exit", r"\[bad-0\] .*the handler ended its process"),
        ("crash", r'\[bad-0\] .*File ".*/bad/model\.py", line 22 in handle'),
    ],
)
def test_it_ends_its_process(server: Server, case: str, line: str) -> None:
    answer = ask(server, case)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    server.log_line(line)


def test_the_memory_that_it_shared_goes_with_its_process(server: Server) -> None:
    memory = Path("/dev/shm", f"left-by-{server.process.pid}")
    answer = server.http.post("/predictions/bad", headers={"x-case": "share memory", "x-name": memory.name})
    assert answer.status_code == 503
    server.log_line(r"leaked shared_memory objects")  # Python's resource tracker logs it, then removes it
    wait_until(lambda: not memory.exists(), "the shared memory is removed")


def test_it_hangs(server: Server) -> None:
    answer = ask(server, "hang")
    assert (answer.status_code, answer.json()["message"]) == (
        503,
        "The request made no progress within predict_timeout=3 seconds",
    )
    server.log_line(r"\[bad-0\] .*model bad: the handler has not returned for \d s")
    server.log_line(r"here it hangs")


@pytest.mark.slow
def test_it_takes_too_much_memory(server: Server) -> None:
    answer = ask(server, "leak", "greedy")
    assert answer.status_code == 507
    assert "more than max_worker_memory_mb=300" in answer.text
    server.log_line(r"\[greedy-0\] .*model greedy: the process takes \d+ MiB")
    assert ask(server, "", "greedy").text == "fine"


@pytest.mark.slow
def test_it_keeps_too_much_memory(server: Server) -> None:
    assert ask(server, "leak later", "greedy").text == "fine"
    server.log_line(r"\[greedy-0\] .*model greedy: the process takes \d+ MiB")
    assert ask(server, "", "greedy").text == "fine"


@pytest.mark.slow
def test_it_prints_a_gigabyte(server: Server) -> None:
    before = resident_mib(server)
    assert ask(server, "print", "loud").text == "fine"
    server.log_line(r"\[loud-0\] writes too fast to be logged; \d+ bytes were dropped")
    assert resident_mib(server) < before + 50


def resident_mib(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return float(next(line.split()[1] for line in status if line.startswith("VmRSS"))) / 1024


@pytest.mark.parametrize("case", ["fork", "fork and exit", "signals"])
def test_it_forks_or_replaces_signal_handlers(server: Server, case: str) -> None:
    assert ask(server, case).text == "fine"
    assert ask(server, case).text == "fine"


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("raise what cannot be encoded", "a \\ud800 and \0"),
        ("raise without a text", ""),
        ("raise from itself", "a circle"),
        ("raise at length", f"{'x' * LONGEST_MESSAGE}... (50000000 characters)"),
        ("a code that is no integer", "Output.code is 200.0; set a status from 200 to 599"),
    ],
)
def test_its_error_reaches_its_own_client(server: Server, case: str, error: str) -> None:
    worker = bad_worker(server)
    answer = ask(server, case)
    assert (answer.status_code, answer.json()["error"]) == (424, error)
    assert bad_worker(server) == worker


def test_the_log_has_the_lines_of_code_that_raised_at_length(server: Server) -> None:
    assert ask(server, "raise at length").status_code == 424
    server.log_line(r"model\.py:56: ValueError: x+\.\.\. \(\d+ characters\)")
    server.log_line(r'raise ValueError\("x" \* 50_000_000\)')


def test_its_header_reaches_its_own_client(server: Server) -> None:
    answer = ask(server, "a header that cannot be encoded")
    assert (answer.text, answer.headers["x-name"]) == ("fine", "a \\ud800")


def bad_worker(server: Server) -> object:
    assert ask(server, "").text == "fine"
    (described,) = server.http.get("/models/bad").json()
    return described["models"][0]["workerGroups"][0]["workers"][0]["pid"]

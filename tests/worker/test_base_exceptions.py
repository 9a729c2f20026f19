"""User code that raises what `except Exception` does not catch: the request ends with the cause, others go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from own_code_helpers import make_own
from server_helpers import Server, running

RAISING = """
import asyncio, os
from djl_python import Input, Output
from djl_python.async_utils import create_stream_chunk_output

class Panic(BaseException):
    "What PyO3 raises where Rust panics derives from BaseException, too."

class Unspeakable(BaseException):
    def __str__(self):
        raise Panic("in __str__")

ERRORS = {error.__name__: error for error in (
    Panic, Unspeakable, GeneratorExit, asyncio.CancelledError, SystemExit, KeyboardInterrupt, StopIteration
)}

def words(body):
    "Yield the process id for each word, and raise where a word is the name of an exception."
    for word in body.split():
        if word in ERRORS:
            raise ERRORS[word]("on purpose")
        yield str(os.getpid()) + " "
"""
FUNCTION = """
def handle(inputs):
    if inputs.is_empty():
        return None
    output = Output()
    for index, item in enumerate(inputs.get_batches()):
        text = "".join(words(item.get_as_string()))
        output.add(text, batch_index=index) if inputs.is_batch() else output.add(text)
    return output
"""
STREAM = """
def handle(inputs):
    if inputs.is_empty():
        return None
    if inputs.get_as_string() == "finalize":
        return Output().add("fine").finalize(lambda: list(words("Panic")))
    return Output().add_stream_content(words(inputs.get_as_string()), None)
"""
ASYNC = """
async def handle(inputs):
    if inputs.is_empty():
        return None
    await asyncio.sleep(0.05)
    body = inputs.get_as_string()
    if body in ERRORS:
        list(words(body))
    return pieces(body)

async def pieces(body):
    for word in words(body):
        yield create_stream_chunk_output(word, False)
        await asyncio.sleep(0.05)
    yield create_stream_chunk_output("", True)
"""
ROLLING = """
live = []

def handle(inputs):
    if inputs.is_empty():
        return None
    if inputs.get_property("reset_rollingbatch"):
        live.clear()
    live.extend(words(item.get_as_string()) for item in inputs.get_batches()[len(live):])
    output, ended = Output(), []
    for one in live:
        word = next(one, None)
        output.add(Output.binary_encode({"data": word or "", "last": word is None}))
        ended += [one] if word is None else []
    live[:] = [one for one in live if one not in ended]
    return output
"""
GENERATE = """
async def generate(request):
    for word in words(request.prompt):
        await asyncio.sleep(0.05)
        yield word
"""
TYPED = """
from lmi_server.contract.handler import ModelInfo, RequestHandler, Response

class Handler(RequestHandler):
    def start(self, model_dir, options):
        return ModelInfo(max_model_len=0)

    def handle(self, requests):
        return [Response(data="".join(words(one.body().decode())).encode()) for one in requests]
"""
TYPED_ASYNC = """
from lmi_server.contract.handler import AsyncRequestHandler, Response

class Handler(AsyncRequestHandler):
    async def handle(self, request):
        await asyncio.sleep(0.05)
        return Response(data="".join(words(request.body().decode())).encode())
"""
KINDS = {
    "function": (FUNCTION, {}),
    "batches": (FUNCTION, {"batch_size": 8, "max_batch_delay": 100}),
    "stream": (STREAM, {}),
    "async": (ASYNC, {"async_mode": "true"}),
    "rolling": (ROLLING, {"rolling_batch": "auto"}),
    "generate": (GENERATE, {}),
    "typed": (TYPED, {}),
    "typed_async": (TYPED_ASYNC, {}),
}
ONE_AT_A_TIME = {"function", "batches", "stream", "typed"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    for name, (code, options) in KINDS.items():
        make_own(store / name, RAISING + code, minWorkers=1, maxWorkers=1, **options)
    with running("--model-store", str(store), workers=len(KINDS)) as server:
        yield server


def ask(server: Server, kind: str, body: str) -> httpx.Response:
    content = f'{{"inputs": "{body}"}}' if kind == "generate" else body
    headers = {"content-type": "application/json" if kind == "generate" else "text/plain"}
    return server.http.post(f"/predictions/{kind}", content=content, headers=headers)


def worker(server: Server, kind: str) -> str:
    """Return the id of the process that answers."""
    answer = ask(server, kind, "a")
    assert answer.status_code == 200, answer.text
    found = re.search(r"\d+", answer.text)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("error", ["Panic", "Unspeakable", "GeneratorExit", "CancelledError", "StopIteration"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_any_class_ends_its_request_alone(server: Server, kind: str, error: str) -> None:
    before = worker(server, kind)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, server, kind, "a b") for _ in range(2)]
        answer = ask(server, kind, error)
        last = pool.submit(ask, server, kind, "a")
    assert answer.status_code == 424, answer.text
    assert answer.json()["error"]
    # As with LMI, the error of a step has no content type: in a rolling batch the code sets the headers.
    assert answer.headers.get("content-type") == (None if kind == "rolling" else "application/json")
    if kind == "rolling":  # a step that raises ends all its requests
        assert error == "StopIteration" or error in answer.text
        assert {other.result().status_code for other in others} <= {200, 424}
    else:
        # LMI reports an Exception without its class, and asyncio hides a StopIteration.
        assert error == "StopIteration" or error in answer.text or "the handler cancelled" in answer.text
        assert [other.result().status_code for other in others] == [200, 200]
    assert last.result().status_code == 200
    assert worker(server, kind) == before, "the worker goes on"


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exit_ends_the_process_and_says_so(server: Server, kind: str, error: str) -> None:
    before = worker(server, kind)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, server, kind, "a b") for _ in range(2)] if kind in ONE_AT_A_TIME else []
        answer = ask(server, kind, error)
        later = pool.submit(ask, server, kind, "a")
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"] == "1"
    assert f"The handler ended its process: {error}(on purpose)" in answer.text
    if kind != "batches":  # a batch is one call
        assert {other.result().status_code for other in others} <= {200}
    assert later.result().status_code == 200
    assert worker(server, kind) != before


@pytest.mark.parametrize("kind", ["stream", "async", "rolling"])
def test_a_stream_that_has_begun_ends_with_the_cause(server: Server, kind: str) -> None:
    before = worker(server, kind)
    answer = ask(server, kind, "a Panic")
    assert answer.status_code == 200
    assert answer.text.startswith(before)
    assert "Panic" in answer.text
    assert '"code":424' in answer.text.replace(" ", "")
    assert worker(server, kind) == before


@pytest.mark.parametrize("kind", ["async", "generate", "typed_async"])
def test_an_exit_leaves_requests_beside_it_to_the_next_worker(server: Server, kind: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(ask, server, kind, "a") for _ in range(3)]
        ended = ask(server, kind, "SystemExit")
        assert ended.status_code == 503
        assert {one.result().status_code for one in beside} <= {200}


def test_what_runs_after_the_answer_may_raise(server: Server) -> None:
    before = worker(server, "stream")
    assert ask(server, "stream", "finalize").text == "fine"
    assert worker(server, "stream") == before


LOADS = {
    "module": "raise {error}('on purpose')",
    "function": "def handle(inputs): raise {error}('on purpose')",
    "async": "async def handle(inputs): raise {error}('on purpose')",
    "rolling": "def handle(inputs): raise {error}('on purpose')",
    "typed": (
        "from lmi_server.contract.handler import RequestHandler\n"
        "class Mine(RequestHandler):\n"
        "    def start(self, model_dir, options): raise {error}('on purpose')\n"
        "    def handle(self, requests): ..."
    ),
    "generate": (
        "from lmi_server.contract.handler import LLMHandler\n"
        "class Mine(LLMHandler):\n"
        "    async def start(self, model_dir, options): raise {error}('on purpose')\n"
        "    def generate(self, request): ...\n"
        "    async def tokenize(self, request): ..."
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("error", ["Panic", "GeneratorExit", "CancelledError", "SystemExit", "KeyboardInterrupt"])
def test_a_load_fails_at_once(tmp_path: Path, error: str) -> None:
    for kind, code in LOADS.items():
        options = {"rolling_batch": "auto"} if kind == "rolling" else {}
        make_own(tmp_path / kind, RAISING + code.format(error=f"ERRORS['{error}']"), **options)
    with running("--model-store", str(tmp_path)) as server:
        failed = {server.log_line(rf"model (\w+) could not be loaded: .*{error}.*on purpose")[1] for _ in LOADS}
    assert failed == LOADS.keys()


@pytest.mark.parametrize("kind", ["function", "async"])
def test_an_adapter_is_refused(tmp_path: Path, kind: str) -> None:
    code, options = KINDS[kind]
    adapter = "def register_adapter(inputs): list(words(inputs.get_property('name')))\n"
    make_own(tmp_path / "model", RAISING + adapter + code, enable_lora="true", **options)
    (tmp_path / "adapter").mkdir()
    with running(tmp_path / "model", workers=1) as server:
        before = worker(server, "model")
        query = {"src": str(tmp_path / "adapter")}
        refused = server.http.post("/models/model/adapters", params={**query, "name": "Panic"})
        assert (refused.status_code, "Panic: on purpose" in refused.text) == (424, True)
        assert worker(server, "model") == before
        assert server.http.post("/models/model/adapters", params={**query, "name": "SystemExit"}).status_code >= 500
        assert worker(server, "model") != before


@pytest.mark.slow
def test_a_failing_stop_does_not_keep_the_process(tmp_path: Path) -> None:
    code = TYPED + "    def stop(self):\n        raise Panic('at the end')\n"
    with running(make_own(tmp_path / "model", RAISING + code), workers=1) as server:
        assert server.stop() == 0

"""The djl_python contract over HTTP, with one worker and several, request by request and in batches."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from own_code_helpers import serving_own
from PIL import Image
from server_helpers import Server
from waiting import wait_until

CONTRACT = Path("contract")


def _workers_and_batch(workers: int, batch_size: int, slow: bool = False) -> object:
    marks = [pytest.mark.slow] * slow
    return pytest.param((workers, batch_size), id=f"{workers}workers-batch{batch_size}", marks=marks)


@pytest.fixture(
    scope="module",
    params=[
        _workers_and_batch(1, 1),
        _workers_and_batch(4, 1, slow=True),
        _workers_and_batch(1, 8, slow=True),
        _workers_and_batch(4, 8),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    workers, batch_size = request.param
    options = {"batch_size": batch_size, "max_batch_delay": 20, "my_key": "mine"}
    with serving_own(tmp_path_factory.mktemp("own"), CONTRACT, workers, **options) as server:
        yield server


def ask(
    server: Server, case: str, body: bytes | str = b"", path: str = "/invocations", **headers: str
) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post(path, content=body, headers={"x-case": case, **names})


def test_the_body_comes_back(server: Server) -> None:
    answer = ask(server, "echo", b"\x00\xff", content_type="application/octet-stream")
    assert (answer.status_code, answer.content) == (200, b"\x00\xff")
    assert answer.headers["content-type"] == "application/octet-stream"


def test_the_first_call_sees_the_configuration(server: Server) -> None:
    received = ask(server, "initial").json()
    assert received["my_key"] == "mine"
    assert received["model_dir"] == received["cwd"]
    assert received["device_id"] == "-1"
    assert received["handler"] == "handle"
    assert "model_id" not in received


def test_a_request_has_headers_query_and_body(server: Server) -> None:
    received = ask(
        server, "request", "b", "/invocations?q=1&q=2",
        x_mine="2", content_type="text/plain", x_amzn_sagemaker_custom_attributes="a=3;b=4", x_request_id="7",
    ).json()  # fmt: skip
    assert received["properties"] == {"X-Mine": "2", "A": "3", "requestId": "7", "CONTENT-TYPE": "text/plain"}
    assert received["content"] == [["q", "1"], ["q", "2"], ["data", "b"]]
    assert not ask(server, "request", content_type="text/plain").json()["is_empty"]
    # As in LMI, a form without fields is an Input without content, for which this model answers nothing.
    assert ask(server, "request", content_type="application/x-www-form-urlencoded").status_code == 204


def test_the_fields_of_a_form_are_contents(server: Server) -> None:
    answer = server.http.post("/invocations", data={"a": "1", "b": "é"}, headers={"x-case": "request"})
    assert answer.json()["content"] == [["a", "1"], ["b", "é"]]
    answer = server.http.post(
        "/invocations?q=0", files={"data": ("f.txt", b"in the file")}, data={"a": "é"}, headers={"x-case": "request"}
    )
    assert answer.json()["content"] == [["q", "0"], ["a", "é"], ["data", "in the file"]]
    as_curl_sends_it = ask(server, "request", '{"a": 1}', content_type="application/x-www-form-urlencoded")
    assert as_curl_sends_it.json()["content"] == [["data", '{"a": 1}']]
    broken = ask(server, "request", b"--x\r\nnonsense", content_type="multipart/form-data; boundary=x")
    assert broken.status_code == 400
    assert "the body is no multipart/form-data" in broken.json()["message"]


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "png")
    return file.getvalue()


def npz(*arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content_type", "body", "decoded"),
    [
        ("application/json", b'{"a": 1}', {"type": "dict", "data": {"a": 1}}),
        ("text/plain", "é".encode(), {"type": "str", "data": "é"}),
        ("image/png", png(), {"type": "PngImageFile", "data": [3, 2]}),
        ("tensor/npz", npz(np.array([1, 2])), {"type": "list", "data": [[1, 2]]}),
        ("tensor/ndlist", npz(np.array([1, 2])), {"type": "list", "data": [[1, 2]]}),
        ("application/x-other", b"\x00", {"type": "bytearray", "data": "\x00"}),
    ],
)
def test_the_body_is_read_by_its_type(server: Server, content_type: str, body: bytes, decoded: Any) -> None:
    assert ask(server, "data", body, content_type=content_type).json() == decoded


@pytest.mark.parametrize(
    ("content_type", "body", "decoded"),
    [
        ("application/json", b'{"inputs": "a"}', {"inputs": "a"}),
        ("text/csv", b"inputs\na\nb\n", {"inputs": ["a", "b"]}),
        ("text/csv", b"question,context\nq,c\n", {"inputs": [{"question": "q", "context": "c"}]}),
        ("text/plain", b"a", {"inputs": ["a"]}),
        ("tensor/npz", npz(np.array([1.5])), {"inputs": [[1.5]]}),
    ],
)
def test_a_body_is_decoded(server: Server, content_type: str, body: bytes, decoded: Any) -> None:
    assert ask(server, "decoded", body, content_type=content_type).json() == decoded


@pytest.mark.parametrize(
    ("accept", "body"),
    [
        ("application/json", b'{\n  "a":[\n    1,\n    2\n  ]\n}'),
        ("text/csv", b"1.0,2.0\n3.0,4.0\n"),
        ("text/plain", b"[\n  [\n    1.0,\n    2.0\n  ],\n  [\n    3.0,\n    4.0\n  ]\n]"),
    ],
)
def test_an_answer_is_encoded(server: Server, accept: str, body: bytes) -> None:
    answer = ask(server, "encode", accept=accept)
    assert (answer.headers["content-type"], answer.content) == (accept, body)


def test_tensors_are_encoded(server: Server) -> None:
    answer = ask(server, "encode", accept="tensor/npz")
    with np.load(io.BytesIO(answer.content)) as archive:
        assert archive["arr_0"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    answer = ask(server, "encode", accept="tensor/ndlist")
    assert answer.headers["content-type"] == "tensor/ndlist"
    again = ask(server, "data", answer.content, content_type="tensor/ndlist")
    assert again.json()["data"] == [[[1.0, 2.0], [3.0, 4.0]]]


@pytest.mark.parametrize(
    ("case", "status", "body"),
    [
        ("none", 204, b""),
        ("reset", 205, b""),
        ("reset in pieces", 205, b""),
        ("nothing in pieces", 204, b""),
        ("code", 418, b"short and stout"),
        ("json", 200, b'{\n  "a":[\n    1,\n    "\xc3\xa9"\n  ]\n}'),
        ("keys", 200, b"second"),
    ],
)
def test_an_output_is_the_answer(server: Server, case: str, status: int, body: bytes) -> None:
    answer = ask(server, case)
    assert (answer.status_code, answer.content) == (status, body)
    assert answer.headers.get("content-length") == (None if status == 204 else str(len(body)))
    assert answer.headers.get("x-pot") == ("tea" if case == "code" else None)


@pytest.mark.parametrize(
    ("case", "status", "error"),
    [
        ("type", 424, "Invalid output type: <class 'dict'>"),
        ("raise", 424, "this one is broken"),
        ("nan", 424, "Out of range float values are not JSON compliant: nan"),
        ("error", 422, "this one is refused"),
        ("bad code", 424, "Output.code is 1000; set a status from 200 to 599"),
        ("memory", 507, "17 GiB"),
    ],
)
def test_a_failure_gives_its_reason(server: Server, case: str, status: int, error: str) -> None:
    answer = ask(server, case)
    assert answer.status_code == status
    assert answer.json() == {"code": status, "message": "invoke handler failure", "error": error}
    assert answer.headers["content-type"] == "application/json"


def test_an_error_replaces_the_content(server: Server) -> None:
    answer = ask(server, "late error")
    assert (answer.status_code, answer.json()["error"]) == (422, "no more")


def test_an_error_without_content_gives_its_message(server: Server) -> None:
    answer = ask(server, "empty code")
    assert (answer.status_code, answer.reason_phrase, answer.text) == (503, "come back later", "")
    answer = ask(server, "empty code in no ASCII")
    assert (answer.status_code, answer.reason_phrase) == (503, "Service Unavailable")
    assert answer.json()["message"] == "später"


def test_an_error_on_openais_paths_has_openais_form(server: Server) -> None:
    answer = ask(server, "raise", path="/v1/completions")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "ValueError: this one is broken"


def test_headers_cannot_break_the_answer(server: Server) -> None:
    answer = ask(server, "headers")
    assert (answer.status_code, answer.content) == (200, b"a")
    assert answer.headers["x-break"] == "a  x-injected: 1"
    assert answer.headers["x-other"] == "é"
    assert "x-injected" not in answer.headers


def test_a_client_may_not_choose_the_function(server: Server) -> None:
    answer = ask(server, "echo", "a", handler="predict")
    assert answer.status_code == 400
    assert answer.json()["message"] == "The handler can't be overridden in a request"


@pytest.mark.parametrize(
    ("form", "body"), [("", b'{"outputs": "a"}\n{"outputs": "b"}\n'), ("upper", b"AB"), ("none", b"ab")]
)
def test_a_stream_is_sent_item_by_item(server: Server, form: str, body: bytes) -> None:
    answer = ask(server, "stream", "a b", x_form=form)
    assert (answer.status_code, answer.content) == (200, body)
    assert answer.headers["content-type"] == "application/jsonlines"
    assert answer.headers["transfer-encoding"] == "chunked"


def test_an_exception_ends_the_stream_with_an_error(server: Server) -> None:
    answer = ask(server, "stream", "a raise", x_form="none")
    assert answer.status_code == 200
    first, _, rest = answer.content.partition(b"a")
    assert first == b""
    assert json.loads(rest)["error"] == "ValueError: in the stream"
    answer = ask(server, "stream", "raise")
    assert (answer.status_code, answer.json()["error"]) == (424, "ValueError: in the stream")


@pytest.mark.parametrize("case", ["finalize", "stream"])
def test_finalize_runs(server: Server, tmp_path: Path, case: str) -> None:
    for number in range(8):  # the worker that ran it answers again once it has
        ask(server, case, "a finalize", x_file=str(tmp_path / str(number)))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 8, "finalize has run for each request")


def together(server: Server, *cases: tuple[str, str]) -> list[httpx.Response]:
    """Send requests at the same time."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: ask(server, *case), cases))


def test_many_requests_get_their_own_answers(server: Server) -> None:
    bodies = [str(number) for number in range(64)]
    assert [answer.text for answer in together(server, *(("echo", body) for body in bodies))] == bodies


def test_only_the_failing_requests_fail(server: Server) -> None:
    cases = [("raise" if number % 8 == 3 else "error" if number % 8 == 5 else "echo", "a") for number in range(32)]
    answers = together(server, *cases)
    expected = {"raise": 424, "error": 422, "echo": 200}
    assert [answer.status_code for answer in answers] == [expected[case] for case, _ in cases]


def test_each_request_of_a_batch_has_its_own_headers(server: Server) -> None:
    answers = together(server, *(("header", str(number)) for number in range(16)))
    assert [answer.headers["x-own"] for answer in answers] == [str(number) for number in range(16)]


def test_djl_python_is_for_workers_only() -> None:
    assert "djl_python" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        import djl_python  # noqa: F401

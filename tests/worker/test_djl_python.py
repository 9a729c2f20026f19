"""What the code of a model.py sees of djl_python: names, types and values as in LMI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from own_code_helpers import serving_own
from server_helpers import Server, connect, received
from waiting import wait_until

CODE = """
import copy, io, json, os, pickle, subprocess, sys, time
import djl_python
from djl_python import Input, Output
from djl_python.encode_decode import decode

LIVE = []

def handle(inputs: Input):
    if inputs.is_empty():
        return None
    output = Output()
    for index, i in enumerate(inputs.get_batches()):
        value = eval(i.get_property("x-eval"), globals() | {"i": i})
        if isinstance(value, Output):
            return value
        output.add_as_json(value, batch_index=index if inputs.is_batch() else None)
    return output

def made(code, inputs):
    output = Output(code, "Made")
    for index in range(inputs.get_batch_size()):
        output.add("b", batch_index=index)
    return output

def batched(inputs):
    return None if inputs.is_empty() else made(201, inputs)

def halved(inputs):
    return None if inputs.is_empty() else Output().add("b", batch_index=0)

def rolling(inputs):
    if inputs.is_empty():
        return None
    output = Output()
    if inputs.get_property("reset_rollingbatch"):
        LIVE.clear()
    for item in inputs.get_batches()[len(LIVE):]:
        keys = [["data", item.get_as_string()], *[key for key in item.content.keys if key != "data"]]
        LIVE.append([item.get_property("x-case"), sorted(item.get_properties()), keys])
    for index, one in enumerate(LIVE):
        case, result = one[0], {"data": "t", "last": False}
        if case == "memory":
            raise MemoryError("17 GiB")
        if case.startswith("/"):  # each step waits until its client has the one before
            steps = one.count("stepped")
            while steps and not os.path.exists(f"{case}/{steps}"):
                time.sleep(0.002)
            one.append("stepped")
            result = {"data": f"{steps} ", "last": steps == 3}
        if case == "names":
            result = {"data": json.dumps(one[1]), "last": True}
        if case == "content":
            result = {"data": json.dumps(one[2]), "last": True}
        if case == "ending":
            result = {"data": "", "last": True, "code": 500, "error": "late"}
        if case == "late":
            one[0] = "ending"
        output.add(Output.binary_encode(result), batch_index=index)
        if result["last"]:
            one[0] = None
    LIVE[:] = [one for one in LIVE if one[0]]
    return output

async def register_adapter(inputs):
    result = {"data": f"Adapter {inputs.get_property('alias')} registered"}
    if inputs.get_property("name") == "refused":
        result = {"data": "", "last": True, "code": 424, "error": "no room to pin"}
    return Output().add(Output.binary_encode(result), key="data")

async def streaming(inputs):
    if inputs.is_empty():
        return None
    async def pieces():
        yield Output().add(Output.binary_encode({"data": "a", "last": False}))
        yield Output().add(Output.binary_encode({"data": "", "last": True, "code": 500, "error": "late"}))
    if inputs.get_property("x-case") == "late":
        return pieces()
    result = {"data": json.dumps(sorted(inputs.get_properties())), "last": True}
    return Output().add(Output.binary_encode(result))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_own(tmp_path_factory.mktemp("own"), CODE) as server:
        yield server


def ask(server: Server, expression: str, body: bytes = b"", **headers: str) -> httpx.Response:
    """Evaluate `expression` in the worker, in which `i` is the request."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post("/invocations", content=body, headers={"x-eval": expression, **sent})


@pytest.mark.parametrize("names", ["dict(p)", "{**p}", "[name for name in p]", "p.keys()", "i.get_properties()"])
def test_properties_have_the_names_that_the_client_wrote(server: Server, names: str) -> None:
    expression = f"(lambda p: sorted(n for n in {names} if n.lower() in ('x-mine', 'MiNe', 'mine')))(i.properties)"
    answer = ask(server, expression, X_mInE="1", X_Amzn_SageMaker_Custom_Attributes="MiNe=2")
    assert answer.json() == ["MiNe", "X-mInE"]
    assert ask(server, "[i.properties['X-MINE'], i.get_property('x-mine')]", X_mInE="1").json() == ["1", "1"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("type(i.get_as_bytes()).__name__", "bytearray"),
        ("(lambda b: [b.append(33), b.decode()])(i.get_as_bytes())[1]", "ab!"),
        ("type(i.get_content().get('data')).__name__", "bytearray"),
        ("pickle.loads(pickle.dumps(i)).get_as_string()", "ab"),
        ("pickle.loads(pickle.dumps(i)).get_property('X-EVAL') == i.get_property('x-eval')", True),
        ("pickle.loads(pickle.dumps(i.get_properties())) == i.get_properties()", True),
        ("pickle.loads(pickle.dumps(i.get_properties()))['X-EVAL'] == i.properties['x-eval']", True),
        ("copy.copy(i).get_property('x-eval') == i.get_property('x-eval')", True),
        ("copy.deepcopy(i).get_as_string()", "ab"),
        ("(lambda c: [c.properties.update(a=1), 'a' in i.properties])(copy.deepcopy(i))[1]", False),
        ("i.get_property('cluster_size')", 1),
        ("hasattr(i, 'nothing')", False),
        ("djl_python.__version__.split('.')[0].isdigit()", True),
        ("json.loads(str(Output(201, 'Made').add('a').add_property('b', 'c')))['properties']", {"b": "c"}),
        ("json.loads(str(Output()))", {"code": 200, "message": "OK", "properties": {}, "content": {}}),
        ("type(Output().get_properties()).__name__", "dict"),
        (
            "subprocess.run([sys.executable, '-c', 'import sys; print(sys.path)'], capture_output=True, text=True)"
            ".stdout.count(repr(i.get_property('model_dir')))",
            1,
        ),
    ],
)
def test_values(server: Server, expression: str, value: Any) -> None:
    assert ask(server, expression, b"ab").json() == value


@pytest.mark.parametrize(
    ("content_type", "body", "decoded"),
    [
        ("tensor/ndlist", "npz", "{'inputs': [array([1, 2])]}"),
        ("tensor/npz", "npz", "{'inputs': [array([1, 2])]}"),
        ("application/x-npy", "npz", "{'inputs': [array([1, 2])]}"),
        ("audio/wav", "ab", "{'inputs': bytearray(b'ab')}"),
        ("text/html", "ab", "{'inputs': bytearray(b'ab')}"),
        ("text/csv", "a,inputs\n1,x\n2,y\n", "{'inputs': ['x', 'y']}"),
        ("text/csv", "Question,b\n1,x\n", "{'inputs': [{'Question': '1', 'b': 'x'}]}"),
        ("application/x-www-form-urlencoded", '{"a": 1}', "{'inputs': '{\"a\": 1}'}"),
    ],
)
def test_decode_gives_a_dict_with_inputs(
    server: Server, content_type: str, body: str, decoded: str, npz: bytes
) -> None:
    data = npz if body == "npz" else body.encode()
    assert (
        ask(server, "repr(decode(i, i.get_property('content-type')))", data, content_type=content_type).json()
        == decoded
    )


@pytest.fixture
def npz(tmp_path: Any) -> bytes:
    np.savez(tmp_path / "a.npz", np.array([1, 2]))
    return bytes((tmp_path / "a.npz").read_bytes())


def test_headers_that_model_and_server_set_are_sent_once(server: Server) -> None:
    expression = (
        "Output().add('a').add_property('Cache-Control', 'max-age=5').add_property('EXPIRES', '0')"
        ".add_property('Pragma', 'x').add_property('X-Request-Id', 'mine')"
        ".add_property('x-a', '1').add_property('X-A', '2')"
    )
    headers = ask(server, expression).headers
    for name in ("cache-control", "expires", "pragma", "x-request-id", "x-a"):
        assert len(headers.get_list(name)) == 1, name
    assert (headers["pragma"], headers["x-a"]) == ("no-cache", "2")
    assert headers["x-request-id"] != "mine"


@pytest.mark.parametrize(
    ("expression", "status", "reason"),
    [
        ("Output(404, 'No such thing').add('b')", 404, "No such thing"),
        ("Output(202, 'Taken').add_stream_content(iter(['b']), None)", 202, "Taken"),
        ("Output().error('boom', code=422, message='my message')", 422, "my message"),
        ("Output(404).add('b')", 404, "Not Found"),
        ("Output(404, None).add('b')", 404, "Not Found"),
        ("Output(404, 'a\\r\\nX-Inject: 1').add('b')", 404, "Not Found"),
        (r"Output(404, 'caf\xe9').add('b')", 404, "Not Found"),
    ],
)
def test_the_message_is_the_reason_phrase(server: Server, expression: str, status: int, reason: str) -> None:
    answer = ask(server, expression)
    assert (answer.status_code, answer.reason_phrase) == (status, reason)
    assert "x-inject" not in answer.headers
    assert "error" in answer.json() if "boom" in expression else answer.text == "b"
    again = ask(server, "1")  # on the same connection
    assert (again.reason_phrase, again.json()) == ("OK", 1)


def test_a_phrase_belongs_to_its_answer_when_requests_are_pipelined(server: Server) -> None:
    request = "POST /invocations HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nx-eval: %s\r\n\r\n"
    sent = "".join(request % expression for expression in ("Output(404, 'Gone').add('b')", "1"))
    with connect(server, sent.encode()) as connection:
        data = received(connection, b"\r\n\r\n1")
    assert data.startswith(b"HTTP/1.1 404 Gone\r\n")
    assert data.count(b"HTTP/1.1 200 OK\r\n") == 1


def test_a_stream_without_items_has_an_empty_body(server: Server) -> None:
    answer = ask(server, "Output().add_stream_content(iter([]), None)")
    assert (answer.status_code, answer.headers["content-length"]) == (200, "0")
    assert "transfer-encoding" not in answer.headers


def test_the_default_formatter_writes_ascii(server: Server) -> None:
    assert ask(server, "Output().add_stream_content(iter(['\\xe9']))").text == '{"outputs": "\\u00e9"}\n'


def test_headers_beyond_ascii_are_sent_as_latin_1(server: Server) -> None:
    raw = dict(ask(server, "Output().add('a').add_property('x-u', '\\xe9').add_property('x-v', '\\u4e2d')").headers.raw)
    assert (raw[b"x-u"], raw[b"x-v"]) == ("é".encode("latin-1"), "中".encode())


def test_requests_in_a_batch(tmp_path: Any) -> None:
    with serving_own(tmp_path, CODE, batch_size=3, max_batch_delay=60_000) as server:
        expressions = ["1", "2", "dict(i.properties)['X-Mine']"]
        sent = [{"x-eval": expression, "X-Mine": "a"} for expression in expressions]
        sent[1]["handler"] = "another"
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda headers: server.http.post("/invocations", headers=headers), sent))
        assert [answer.status_code for answer in answers] == [200, 400, 200]
        assert [answers[0].json(), answers[2].json()] == [1, "a"]
        assert not any("repeating" in line for line in server.lines)


def test_a_batch_keeps_its_code(tmp_path: Any) -> None:
    with serving_own(tmp_path, CODE, batch_size=3, max_batch_delay=60_000, handler="batched") as server:
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda _: server.http.post("/invocations"), range(3)))
        assert [(answer.status_code, answer.reason_phrase, answer.text) for answer in answers] == [
            (201, "Made", "b")
        ] * 3


@pytest.fixture(scope="module")
def rolling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_own(tmp_path_factory.mktemp("own"), CODE, rolling_batch="auto", handler="rolling") as server:
        yield server


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_own(tmp_path_factory.mktemp("own"), CODE, handler="streaming", enable_lora="true") as server:
        yield server


def case(server: Server, name: str) -> httpx.Response:
    return server.http.post("/invocations", content=b"a", headers={"X-Case": name})


def test_requests_with_one_id_are_tracked_by_ids_of_their_own(asynchronous: Server) -> None:
    headers = {"X-Case": "names", "x-request-id": "mine"}
    answers = [asynchronous.http.post("/invocations", content=b"a", headers=headers) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    tracked = {answer.headers["request_tracking_id"] for answer in answers}
    assert len(tracked - {"mine"}) == 2


def test_memory_that_runs_out_in_a_step_is_507(rolling: Server) -> None:
    answer = case(rolling, "memory")
    assert (answer.status_code, answer.json()["code"]) == (507, 507)
    assert "X-Case" in case(rolling, "names").json()


def test_an_error_that_a_stream_tells_keeps_its_code(rolling: Server, asynchronous: Server) -> None:
    assert case(rolling, "late").text == 't{"error":"late","code":500}'
    assert case(asynchronous, "late").text == 'a{"error":"late","code":500}'


def test_requests_have_ids_in_every_mode(rolling: Server, asynchronous: Server) -> None:
    assert {"requestId", "X-Case"} < set(case(rolling, "names").json())
    answer = case(asynchronous, "names")
    assert {"requestId", "request_tracking_id", "X-Case"} < set(answer.json())
    assert answer.headers["request_tracking_id"]
    assert "x-request-id" not in {name.lower() for name in answer.json()}
    assert json.loads(answer.text) == answer.json()


def test_a_rolling_batch_gets_the_body_alone(rolling: Server) -> None:
    """LMI drops the query, and hands over a form as it is."""
    answer = rolling.http.post("/invocations?q=1", data={"a": "b"}, headers={"X-Case": "content"})
    assert answer.json() == [["data", "a=b"], "seed"]


def test_a_request_of_a_batch_without_an_answer_is_400(tmp_path: Any) -> None:
    with serving_own(tmp_path, CODE, batch_size=2, max_batch_delay=60_000, handler="halved") as server:
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda _: server.http.post("/invocations"), range(2)))
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        refused = next(answer.json() for answer in answers if answer.status_code == 400)
        assert refused["type"] == "TranslateException"
        assert "no content batch_1" in refused["message"]


def test_adapter_functions_answer_as_lmis_services_do(asynchronous: Server, tmp_path: Any) -> None:
    answers = [
        asynchronous.http.post("/models/model/adapters", params={"name": name, "src": str(tmp_path)})
        for name in ("first", "refused")
    ]
    assert (answers[0].status_code, "Adapter first registered" in answers[0].text) == (200, True)
    assert (answers[1].status_code, "no room to pin" in answers[1].text) == (424, True)


def test_each_step_of_a_rolling_batch_is_sent_before_the_next_one(rolling: Server, tmp_path: Any) -> None:
    with rolling.http.stream("POST", "/invocations", content=b"a", headers={"X-Case": str(tmp_path)}) as answer:
        pieces = answer.iter_text()
        for step in range(4):
            assert next(pieces) == f"{step} "
            (tmp_path / str(step + 1)).touch()


@pytest.mark.slow
def test_a_handle_beside_an_engine_of_ranks_serves(tmp_path: Any) -> None:
    with serving_own(tmp_path, CODE, engine="MPI") as server:
        assert ask(server, "[os.environ['RANK'], os.environ['WORLD_SIZE']]").json() == ["0", "1"]


RANKS = """
import os, time
from djl_python import Output

def handle(inputs):
    note("loads" if inputs.is_empty() else inputs.get_as_string())
    if inputs.is_empty():
        return None
    words = inputs.get_as_string().split()
    return Output().add_stream_content(stream(words), None) if len(words) > 1 else Output().add(words[0])

def stream(words):
    for word in words:
        note(word)
        time.sleep(0.05)
        yield word

def note(text):
    with open(f"rank-{os.environ['RANK']}", "a") as file:
        file.write(text + ";")
"""


@pytest.mark.slow
def test_all_ranks_call_the_code_and_rank_0_answers(tmp_path: Any) -> None:
    """A stream runs to its end on every rank, also if its client leaves."""
    with serving_own(tmp_path, RANKS, engine="MPI", tensor_parallel_degree=2) as server:
        assert server.http.post("/invocations", content="one").text == "one"
        assert server.http.post("/invocations", content="a b").text == "ab"
        with server.http.stream("POST", "/invocations", content="c d e f") as answer:
            next(answer.iter_raw())
        assert server.http.post("/invocations", content="last").text == "last"
        notes = "loads;one;a b;a;b;c d e f;c;d;e;f;last;"
        directory = tmp_path / "model"
        assert (directory / "rank-0").read_text() == notes
        wait_until(lambda: (directory / "rank-1").read_text() == notes, "rank 1 has done the same")

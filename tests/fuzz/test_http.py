"""Any bytes on a connection, and any call of the management API: an answer or the end of the connection, no crash."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fuzzing import NUMBERS, TEXTS, VALUES, budget, words
from hypothesis import given
from hypothesis import strategies as st
from own_code_helpers import make_own
from server_helpers import Server, connect, make_model, received, running

OWN = """
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add(inputs.get_as_bytes())
"""
SETTINGS = {"SERVING_REQUEST_HEAD_TIMEOUT": "20", "SERVING_REQUEST_BODY_TIMEOUT": "20"}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
"""No input has these bytes, so that they begin an answer wherever they stand."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("fuzz")
    make_model(store / "echo", "handlers.echo.handler:EchoHandler", enable_lora="true")
    make_own(store / "own", OWN, maxWorkers=1)
    with running("--model-store", store, variables=SETTINGS, workers=2) as server:
        yield server
        for model in ("echo", "own"):
            server.until("lmi_requests_in_flight", 0, model)
            server.until("lmi_queue_depth", 0, model)
        assert server.http.post("/predictions/own", content=b"fine").text == "fine"
        assert server.stop() == 0
    log = "".join(server.lines)
    assert "Traceback" not in log, log
    assert "uvicorn.error" not in log, log


# --- bytes ---

METHODS = st.sampled_from(
    [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PATCH", b"PRI", b"get", b"X", b""]
)
TARGETS = words(
    "/ /invocations /predictions/echo /predictions/own /predictions/own/1 /v1/chat/completions /v2/models/echo/infer "
    "/models/own/invoke /models /ping /metrics /openapi.json /server/logging?level=x //a /%zz /%ff /%00 /.. /a%2fb "
    "http://x/ping http://[::1/ping https://x/invocations * x:1 ? # /ping?a=%zz /predictions/own?model_name=%ff "
    "/invocations?model_name=own&model_version=%00 /predictions/ /predictions//// /models//invoke /v1/models/%0a"
).map(str.encode)
VERSIONS = st.sampled_from(
    [b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.9", b"HTTP/0.9", b"http/1.1", b""]
)
ENDS = st.sampled_from([*[b"\r\n"] * 6, b"\n", b"\r", b""])
WORDS = st.binary(max_size=5) | st.sampled_from([b"own", b"echo", b"1", b"-1", b"9" * 4400, b"a=b;c", b"\xff", b"a,b"])
FIELDS = st.one_of(
    st.sampled_from(
        [
            *(b"host: x", b"host: ", b"host: [", b"connection: close", b"connection: keep-alive, upgrade"),
            *(
                b"upgrade: websocket",
                b"sec-websocket-key: eA==",
                b"upgrade: h2c",
                b"expect: 100-continue",
                b"expect: x",
            ),
            *(b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"transfer-encoding: x"),
            *(b"content-type: application/json", b"content-type: multipart/form-data; boundary=b", b"te: trailers"),
            *(b"content-type: application/x-www-form-urlencoded", b"content-encoding: gzip", b"origin: http://["),
            *(b" folded", b": nameless", b"no colon", b"a\x00b: c", b"x: \x00", b"forwarded: for=1.2.3.4"),
        ]
    ),
    st.builds(
        lambda name, value: name + b": " + value,
        words(
            "content-length model_name model_version x-priority x-request-id host origin accept content-type "
            "x-amzn-sagemaker-custom-attributes inference-header-content-length content-encoding sec-fetch-site"
        ).map(str.encode),
        WORDS,
    ),
)
FORM = b'--b\r\ncontent-disposition: form-data; name="model_name"\r\n\r\n\xff\r\n--b--\r\n'
BODIES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"{}", b'{"inputs": "a b"}', b'{"inputs": "a", "stream": true}', b"model_name=%ff", FORM, b"\x1f\x8b"]
    ),
    st.builds(lambda value: json.dumps(value).encode()[:3000], VALUES),
)
CHUNKS = st.builds(
    lambda parts, tail: b"".join(b"%x%b\r\n%b\r\n" % (len(part), more, part) for part, more in parts) + tail,
    st.lists(st.tuples(BODIES, st.sampled_from([b"", b"", b";a=b", b"\x00", b"x"])), max_size=3),
    st.sampled_from(
        [
            b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"0\r\nx: y\r\n\r\n",
            b"0\r\nno colon\r\n\r\n",
            b"",
            b"-1\r\n",
            b"f" * 17 + b"\r\n",
        ]
    ),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draw a request: a line, fields with the ends of lines that they have, and a body that may be framed."""
    body = draw(BODIES)
    framing = [b"content-length: %d" % (len(body) + draw(st.sampled_from([0, 0, 0, 3, -1])))]
    if draw(st.booleans()):
        framing, body = [b"transfer-encoding: chunked"], draw(CHUNKS)
    flood = [b"x: y" * 10] * draw(st.sampled_from([0, 0, 0, 0, 0, 300, 3000]))
    fields = [*draw(st.lists(FIELDS, max_size=4)), *draw(st.sampled_from([framing, framing, framing, []])), *flood]
    end = draw(ENDS)
    line = b" ".join((draw(METHODS), draw(TARGETS), draw(VERSIONS))) + draw(ENDS)
    return b"".join((line, *(field + end for field in fields), end, body))


def exchanged(server: Server, parts: list[bytes]) -> bytes:
    """Send the parts one by one and end this side; return all that comes back. Whatever it was, the server ends it."""
    with connect(server, b"") as connection:
        connection.settimeout(60)
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused half-way
        try:
            return received(connection)
        except ConnectionError:
            return b""


@pytest.mark.slow
@budget(400)
@given(st.lists(messages(), min_size=1, max_size=3), st.integers(0, 400), st.booleans())
def test_any_bytes_are_answered_or_end_the_connection(server: Server, sent: list[bytes], cut: int, whole: bool) -> None:
    data = b"".join(sent)
    answer = exchanged(server, [data] if whole else [data[:cut], data[cut:]])
    assert not answer or STATUS.match(answer), answer
    statuses = {int(status) for status in STATUS.findall(answer)}
    assert {status for status in statuses if status >= 500} <= {505}, answer  # another major version of HTTP
    assert b"Traceback" not in answer


# --- calls of the management API ---

NAMES = words(
    "url model_name model_version engine device batch_size job_queue_size max_batch_delay max_idle_time synchronous "
    "template name src preload pin limit next_page_token level name[] option.entryPoint option.model_id option.env "
    "option.rolling_batch option.tensor_parallel_degree option.task option. x"
)
LOCATIONS = words(
    "/etc /nowhere file:/etc file://[::1 file:%00 http://[ s3://a ~root/x .. // [x]=y /dev/null /proc/self/mem "
    "/etc/passwd.tar.gz x.tar.gz a/b/c MPI gpu0 true 0 -1 1 100000000000"
) | st.sampled_from(["x" * 300, "x" * 5000, "/" + "x/" * 3000, "gpu" + "9" * 4400, "\x00", "²"])
ARGUMENTS = LOCATIONS | TEXTS | NUMBERS | VALUES
PATHS = words(
    "/models /workflows /models/M /models/M/X /models/M/adapters /models/M/adapters/X /models/M/adapters/X/update "
    "/adapters /adapters/X /workflows/M /metrics /server/metrics /info /v1/models /v1/models/X /v2/repository/index "
    "/v2/models/M/versions/X /v2/models/M/ready /ping/X /server/logging /models/M/X/invoke /predictions/M/X"
)
MODELS = st.sampled_from(["echo", "own", "none", "", "%00", "%2e%2e", "%ff"])
JSON = {"content-type": "application/json"}


def is_failed_load(answer: httpx.Response) -> bool:
    """Return whether a model cannot be fetched or loaded, which is 500: a text may be the id of a model on the Hub."""
    return answer.status_code == 500 and answer.json()["type"] == "EngineException"


@budget(150)
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    *(PATHS, MODELS, st.text(max_size=4) | TEXTS),
    *(st.dictionaries(NAMES, ARGUMENTS, max_size=3), st.dictionaries(NAMES, ARGUMENTS, max_size=3)),
)
def test_any_call_of_the_management_api_is_answered(
    server: Server, method: str, path: str, model: str, last: str, query: dict[str, Any], body: dict[str, Any]
) -> None:
    target = path.replace("M", model).replace("X", quote(last[:2000], safe="", errors="replace"))
    unloads = method == "DELETE" and model in ("echo", "own") and "adapters" not in path
    if unloads:
        return
    parameters = {name: str(value)[:5000] for name, value in query.items()}
    answer = server.http.request(method, target, params=parameters, content=json.dumps(body).encode(), headers=JSON)
    assert answer.status_code < 500 or is_failed_load(answer), answer.text

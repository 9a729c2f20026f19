"""No request keeps the event loop busy for long: every route gets the heads and bodies that cost the most."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection

import pytest
from fuzzing import is_long
from loop_meter import VARIABLE, LoopMeter
from own_code_helpers import make_own
from server_helpers import Server, make_model, received, running

pytestmark = pytest.mark.slow

LONGEST_BUSY_S = 0.05
LONGEST_PING_S = 0.2
PING_PAUSE_S = 0.01
TRIES = 4  # another process may take the processor during one of them
SIZE = 10_000_000 if is_long() else 1_000_000
HEAD = 60_000
STRIDE = 4
"""GET gives a body no meaning: each body goes to one of so many of its routes."""
LIMIT_S = 60
OWN = """
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add(b"done")
"""
SETTINGS = {
    "SERVING_EXTRA_LOGS": "access",
    "SERVING_ACCESS_LOG": "text",
    "SERVING_LOG_PROMPTS": "true",
    "SERVING_MODEL_URL_PATTERN": "s3://.*",
}


@dataclass
class Attacked:
    """A server with two models, so that it looks for the model's name in bodies, and the meter of its loop."""

    server: Server
    meter: LoopMeter
    routes: list[tuple[str, str]]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    store = tmp_path_factory.mktemp("store")
    make_model(store / "echo", "handlers.echo.handler:EchoHandler", enable_lora="true")
    make_own(store / "own", OWN, maxWorkers=1)
    place = tmp_path_factory.mktemp("meter") / "longest"
    meter = LoopMeter(place)
    with running("--model-store", store, variables={**SETTINGS, VARIABLE: str(place)}, workers=2) as server:
        yield Attacked(server, meter, routes_of(server))
        left = {each["modelName"] for each in server.http.get("/models").json()["models"]}
        assert left == {"echo", "own"}, "a request has removed a model, and later ones met 404"


def routes_of(server: Server) -> list[tuple[str, str]]:
    """Return method and path of every route, from the document that the server makes of its table."""
    paths = server.http.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return sorted((method, path) for method, path in found if not path.startswith("/console"))


# --- what costs the most ---


def repeated(part: str | bytes, size: int = SIZE) -> bytes:
    encoded = part if isinstance(part, bytes) else part.encode()
    return encoded * (size // len(encoded))


def in_json(names: str, part: str) -> bytes:
    """Return an object with a long text of `part` under each of the names."""
    each = repeated(part, SIZE // len(names.split())).decode()
    return json.dumps(dict.fromkeys(names.split(), each)).encode()


def members(make: Callable[[int], str], around: str = "{%s}") -> bytes:
    """Return JSON with as many members as fit, each of which `make` writes from its number."""
    parts, size = [], 0
    while size < SIZE:
        parts.append(make(len(parts)))
        size += len(parts[-1]) + 1
    return (around % ",".join(parts)).encode()


JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=b"
PART = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
NAMES = "model prompt inputs input text_input name url src model_name query adapters"
BODIES: Mapping[str, tuple[str, bytes]] = {
    "words before ://": (JSON, in_json("model", "a")[:-2] + b'://"}'),
    "many ://": (JSON, in_json(NAMES, "a://")),
    "names of parameters": (JSON, in_json(NAMES, "?token")),
    "many parameters": (JSON, in_json(NAMES, "&a=b")),
    "directories": (JSON, in_json(NAMES, "/a")),
    "lines": (JSON, in_json(NAMES, "\n[METRICS]A.Count:1|#a:b|c")),
    "nested": (JSON, repeated("[")),
    "nested objects": (JSON, repeated('{"model":')),
    "empty lists": (JSON, b'{"model":"x","inputs":[' + repeated("[],") + b"0]}"),
    "digits": (JSON, b'{"model":' + repeated("1") + b"}"),
    "priority": (JSON, b'{"model":"echo","priority":' + repeated("1") + b"}"),
    "unknown fields": (JSON, members(lambda number: f'"temperatur{number}":{number}')),
    "long unknown field": (JSON, b'{"inputs":"a","' + repeated("a://") + b'":1}'),
    "repeated field": (JSON, members(lambda number: '"model":"a"')),
    "messages": (JSON, members(lambda number: '{"role":"user","content":"a"}', '{"model":"echo","messages":[%s]}')),
    "parts": (
        JSON,
        members(
            lambda number: '{"type":"text","text":"a"}',
            '{"model":"echo","messages":[{"role":"user","content":[%s]}],"max_tokens":1}',
        ),
    ),
    "tools": (
        JSON,
        members(
            lambda number: f'{{"type":"function","function":{{"name":"f{number}"}}}}',
            '{"model":"echo","messages":[{"role":"user","content":"a"}],"tools":[%s],"max_tokens":1}',
        ),
    ),
    "stop strings": (
        JSON,
        members(
            lambda number: f'"{"a" * 50}{number}"',
            '{"model":"echo","prompt":"a a a","inputs":"a","messages":[{"role":"user","content":"a"}],"stop":[%s]}',
        ),
    ),
    "biases": (JSON, members(lambda number: f'"{number}":1', '{"model":"echo","prompt":"a","logit_bias":{%s}}')),
    "prompts": (JSON, members(lambda number: '"a"', '{"model":"echo","prompt":[%s],"inputs":[""],"input":["b"]}')),
    "tensors": (
        JSON,
        members(
            lambda number: f'{{"name":"t{number}","datatype":"BYTES","shape":[1],"data":["a"]}}', '{"inputs":[%s]}'
        ),
    ),
    "name of a tensor": (
        JSON,
        b'{"inputs":[{"name":"' + repeated("a://") + b'","datatype":"X","shape":[1],"data":["a"]}]}',
    ),
    "shape": (JSON, b'{"inputs":[{"name":"a","datatype":"INT8","shape":[' + repeated("1,") + b'1],"data":[1]}]}'),
    "fields of a form": (FORM, repeated("a=b&")),
    "blank fields of a form": (FORM, repeated("a&")),
    "percents of a form": (FORM, b"model_name=" + repeated("%41")),
    # Fewer, because a worker decodes them all, a million in 0.4 s. The server would take 0.08 s for these.
    "broken percents of a form": (FORM, b"model_name=" + repeated("%", SIZE // 5)),
    "name in a form": (FORM, b"model_name=" + repeated("a://")),
    "parts of a form": (MULTIPART, repeated(PART % (b"a", b"b")) + b"--b--\r\n"),
    "distinct parts of a form": (
        MULTIPART,
        b"".join(PART % (b"a%d" % number, b"") for number in range(SIZE // 60)) + b"--b--\r\n",
    ),
    "name of a part": (MULTIPART, PART % (repeated(";name="), b"b") + b"--b--\r\n"),
    "quoted name of a part": (MULTIPART, PART % (repeated('\\"'), b"b") + b"--b--\r\n"),
    "dispositions": (MULTIPART, b"--b\r\n" + repeated("content-disposition: ;") + b"\r\n\r\n--b--\r\n"),
    "delimiters": (MULTIPART, repeated("--b")),
    "delimiters on lines": (MULTIPART, repeated("\n--b")),
    "blank delimiters": (MULTIPART, repeated("--b \t\r\n\r\n") + b"--b--"),
    "model in a part": (MULTIPART, PART % (b"model_name", repeated("a://")) + b"--b--\r\n"),
    "image in a part": (MULTIPART, PART % (b"image", repeated("a")) + b"--b--\r\n"),
    "columns": ("text/csv", repeated("inputs,")),
    "rows": ("text/csv", b"inputs\n" + repeated("a\n")),
    "quotation marks": ("text/csv", b"inputs\n" + repeated('"')),
    "text": ("text/plain", repeated("a://")),
    "bytes": ("application/octet-stream", repeated(b"\xff")),
}
HEADERS: Mapping[str, Mapping[str, str]] = {
    "accept": {"accept": "a/b;q=0.1," * (HEAD // 10)},
    "content type": {"content-type": "multipart/form-data" + "; boundary=" * (HEAD // 11)},
    "quoted content type": {"content-type": "multipart/form-data" + ';  boundary="' * (HEAD // 13)},
    "attributes": {"x-amzn-sagemaker-custom-attributes": "a=b;" * (HEAD // 4)},
    "id": {"x-request-id": "a://" * (HEAD // 4)},
    "directories": {"x-request-id": "/a" * (HEAD // 2), "model_name": "/a"},
    "model": {"model_name": "a://" * (HEAD // 4)},
    "component": {"x-amzn-sagemaker-inference-component": "?token" * (HEAD // 6)},
    "priority": {"x-priority": "1" * HEAD},
    "time": {"x-request-timeout": "1" * HEAD},
    "keys": {"authorization": "Bearer " + "a, " * (HEAD // 3), "x-api-key": "a"},
    "cookies": {"cookie": "a=b; " * (HEAD // 5)},
    "trace": {"traceparent": "00-" + "0" * HEAD, "tracestate": "a=b,"},
    "proxies": {"forwarded": "for=1.1.1.1," * (HEAD // 12)},
    "token": {"x-starting-token": "0" * HEAD, "x-synchronous": "false"},
    "encoding": {"content-encoding": "gzip, " * (HEAD // 6)},
    "origin": {"origin": "http://" + "a." * (HEAD // 2)},
    "many": {f"x-{number}": "a" for number in range(HEAD // 12)},
}
NAMES_IN_PATHS: Mapping[str, str] = {
    "words": "a" * HEAD + "://",
    "many ://": "a://" * (HEAD // 4),
    "parameters": "&a=b" * (HEAD // 4),
    "percents": "%41" * (HEAD // 3),
    "slashes": "/a" * (HEAD // 2),
    "hidden lines": "%0a[METRICS]a.Count:1" * (HEAD // 21),
}
QUERIES: Mapping[str, str] = {
    "parameters": "a=b&" * (HEAD // 4),
    "names": "a&" * (HEAD // 2),
    "percents": "model_name=" + "%41" * (HEAD // 3),
    "pages": "limit=" + "1" * HEAD,
    "token": "?token" * (HEAD // 6),
    "metrics": "name[]=a&" * (HEAD // 9),
    "url": "url=" + "s3://" + "a" * (HEAD - 10),
    "model": "model_name=" + "a://" * (HEAD // 4),
}


def requests_with(
    attacked: Attacked,
    body: tuple[str, bytes] = (JSON, b""),
    headers: Mapping[str, str] = {},
    name: str = "echo",
    query: str = "",
    routes: Sequence[tuple[str, str]] = (),
) -> Iterator[tuple[str, bytes]]:
    """Yield a request to each route; `name` takes the place of the parameters of its path.

    The model has to stay for the other requests, and no request waits for the end of a trial or of a load: those that
    remove, try or reload a model name another one.
    """
    for method, path in routes or attacked.routes:
        changes = method == "DELETE" or path.endswith(("/canary", "/reload"))
        named = "gone" if changes and name == "echo" else name
        target = "/".join(named if part.startswith("{") else part for part in path.split("/"))
        sent = {"content-type": body[0], "content-length": str(len(body[1])), **headers}
        lines = "".join(f"{key}: {value}\r\n" for key, value in sent.items())
        head = f"{method} {target}{'?' if query else ''}{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{lines}\r\n"
        yield f"{method} {path}", head.encode("latin-1") + body[1]


def exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        try:
            connection.sendall(data)
            return received(connection)
        except ConnectionError:
            return b""  # refused before it was read


class Pings:
    """Asks for /ping all the time; `longest_s` is how long that took at most since `reset`.

    httpx would take more of the processor than the server does.
    """

    def __init__(self, server: Server) -> None:
        self._http = HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest_s = 0.0

    def _run(self) -> None:
        with contextlib.closing(self._http) as http:
            while not self._ended.wait(PING_PAUSE_S):
                before = time.monotonic()
                try:
                    http.request("GET", "/ping")
                    http.getresponse().read()
                except ConnectionError:  # it was closed between two requests
                    http.close()
                else:
                    self.longest_s = max(self.longest_s, time.monotonic() - before)

    def reset(self) -> None:
        self.longest_s = 0.0

    def __enter__(self) -> Pings:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()


def attack(attacked: Attacked, requests: Iterator[tuple[str, bytes]]) -> None:
    """Send the requests one by one; fail with all that kept the loop busy, or /ping waiting, in each of some tries."""
    slow = []
    with Pings(attacked.server) as pings:
        for what, data in requests:
            found = [found_slow(attacked, pings, data)]
            while found[-1] and len(found) < TRIES:
                found.append(found_slow(attacked, pings, data))
            if found[-1]:
                slow.append(f"{what}: {min(found)}")
    assert not slow, "\n".join(slow)


def found_slow(attacked: Attacked, pings: Pings, data: bytes) -> str:
    """Send one request; return what took too long, "" if nothing did."""
    attacked.meter.take()
    pings.reset()
    before = time.monotonic()
    exchange(attacked.server.port, data)
    answer_s, ping_s = time.monotonic() - before, pings.longest_s
    busy_s, spent_s = attacked.meter.take()
    # What /ping waits for while the server spends no time is another process of this machine.
    if busy_s > LONGEST_BUSY_S or min(ping_s, spent_s) > LONGEST_PING_S or answer_s > LIMIT_S / 2:
        return f"the loop was busy for {busy_s:.3f} s, /ping took {ping_s:.3f} s, the answer {answer_s:.3f} s"
    return ""


@pytest.mark.parametrize("name", BODIES)
def test_bodies(attacked: Attacked, name: str) -> None:
    """The routes of GET get some of the bodies: other ones in other tests."""
    others = [route for route in attacked.routes if route[0] == "GET"]
    taking = [route for route in attacked.routes if route[0] != "GET"]
    some = others if is_long() else others[list(BODIES).index(name) % STRIDE :: STRIDE]
    attack(attacked, requests_with(attacked, BODIES[name], routes=[*taking, *some]))


@pytest.mark.parametrize("name", HEADERS)
def test_headers(attacked: Attacked, name: str) -> None:
    attack(attacked, requests_with(attacked, (JSON, b"{}"), HEADERS[name]))


@pytest.mark.parametrize("name", NAMES_IN_PATHS)
def test_names_in_paths(attacked: Attacked, name: str) -> None:
    attack(attacked, requests_with(attacked, (JSON, b"{}"), name=NAMES_IN_PATHS[name]))


@pytest.mark.parametrize("name", QUERIES)
def test_queries(attacked: Attacked, name: str) -> None:
    attack(attacked, requests_with(attacked, (JSON, b"{}"), query=QUERIES[name]))

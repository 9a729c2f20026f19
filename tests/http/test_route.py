"""`lmi-server route` in front of fake servers: each request has one end, whatever the servers do."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from paths import ROOT
from route_helpers import EVENTS, USAGE, FakeServer, Router, fakes, routing
from waiting import wait_until

KEYS = """
[keys.small]
key = "small-key"
requests_per_minute = 2
models = ["mod*"]

[keys.spent]
key = "spent-key"
tokens_per_day = 10
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeServer]]:
    with fakes(2) as both:
        yield both


@pytest.fixture(scope="module")
def router(servers: list[FakeServer]) -> Iterator[Router]:
    with routing(*(server.url for server in servers)) as router:
        until_healthy(router, 2)
        yield router


def until_healthy(router: Router, count: int) -> None:
    wait_until(
        lambda: sum(each["healthy"] for each in router.servers().values()) == count, f"{count} servers are healthy"
    )


def until_idle(router: Router) -> None:
    wait_until(lambda: not sum(each["requests"] for each in router.servers().values()), "no server has a request")


def asked_last(servers: list[FakeServer], do: str) -> str:
    """Return the body of the last request with that `do`."""
    return next(a.body.decode() for server in servers for a in reversed(server.asked) if a.fields.get("do") == do)


# --- what passes ---


def test_a_stream_passes_byte_for_byte(router: Router) -> None:
    answer = router.chat("stream", stream=True)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.content == b"".join(EVENTS) + USAGE


def test_a_body_passes_byte_for_byte(router: Router, servers: list[FakeServer]) -> None:
    body = '{ "model" : "model", "do":"echo",  "text": "\\u00e9\\ud83d é", "n": 1.0e2 }'.encode()
    path = "/v1/completions?api-version=1&x=a%20b"
    answer = router.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    found = [asked for server in servers for asked in server.asked if asked.body == body]
    assert [asked.path for asked in found] == ["/v1/completions?api-version=1&x=a+b"]


def test_status_and_body_of_a_refusal_pass(router: Router) -> None:
    answer = router.chat("busy")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")
    assert answer.json() == {"error": {"message": "later"}}


def test_headers_of_one_connection_stay_there(router: Router, servers: list[FakeServer]) -> None:
    sent = {
        "connection": "keep-alive, x-private",
        "x-private": "1",
        "te": "trailers",
        "x-forwarded-for": "127.0.0.1",
        "x-real-ip": "127.0.0.1",
        "forwarded": "for=127.0.0.1",
        "proxy-authorization": "Basic x",
        "accept-encoding": "gzip",
        "authorization": "Bearer of-the-client",
        "x-kept": "1",
        "X-Amzn-SageMaker-Custom-Attributes": "host=evil;x-new=1",
    }
    answer = router.http.post("/v1/chat/completions", json={"model": "model", "do": "hops"}, headers=sent)
    assert answer.json() == {}
    assert answer.headers["x-kept"] == "1"
    assert not {"x-secret", "keep-alive", "upgrade", "server"} & answer.headers.keys()
    [asked] = [asked for server in servers for asked in server.asked if asked.fields.get("do") == "hops"]
    names = Counter(name.lower() for name, _ in asked.headers)
    assert max(names.values()) == 1
    gone = {"connection", "x-private", "te", "x-forwarded-for", "x-real-ip", "proxy-authorization", "accept-encoding"}
    assert not gone & names.keys()
    assert "x-new" not in names
    assert asked.header("host") in {server.url.removeprefix("http://") for server in servers}
    assert (asked.header("authorization"), asked.header("x-kept")) == ("Bearer of-the-client", "1")
    assert asked.header("forwarded") == "for=unknown"
    assert asked.header("x-amzn-sagemaker-custom-attributes") == "host=evil;x-new=1"


@pytest.mark.parametrize("do", ["hints", "until_close"])
def test_other_forms_of_an_answer(router: Router, do: str) -> None:
    assert router.chat(do).json()["answer"] in (1, "to the end")


# --- what servers do wrong ---


@pytest.mark.parametrize("do", ["die", "short", "garbage", "both", "long_head", "many_headers", "upgrade"])
def test_a_broken_answer_is_one_error(router: Router, servers: list[FakeServer], do: str) -> None:
    answer = router.chat(do)
    assert answer.status_code == 502, answer.text
    assert "The server that had the request" in answer.json()["error"]["message"]
    asked = [a for server in servers for a in server.asked if a.fields.get("do") == do]
    assert len(asked) == 1, "a request that a server may have begun is not sent again"
    assert router.chat().status_code == 200


def test_a_stream_that_breaks_ends_in_an_error(router: Router) -> None:
    lines = router.chat("half", stream=True).text.split("\n\n")
    assert lines[0].encode() + b"\n\n" == EVENTS[0]
    assert "within its answer" in json.loads(lines[1].removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in lines[-1]


def test_what_follows_an_answer_is_nobodys(router: Router) -> None:
    for _ in range(4):
        assert router.chat("two").json() == {"answer": 1}
        assert "server" in router.chat().json()


def test_a_client_that_leaves_ends_its_request(router: Router, servers: list[FakeServer]) -> None:
    before = sum(server.gone for server in servers)
    body = {"model": "model", "do": "endless", "stream": True}
    with router.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_bytes())
    with pytest.raises(httpx.ReadTimeout):
        router.http.post("/v1/chat/completions", json={"model": "model", "do": "wait"}, timeout=0.3)
    wait_until(lambda: sum(server.gone for server in servers) == before + 2, "both servers know")
    until_idle(router)


def test_a_client_that_does_not_read_stops_its_server_alone(router: Router) -> None:
    host, port = router.url.removeprefix("http://").split(":")
    body = b'{"model": "model", "do": "endless", "stream": true}'
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        client.recv(10)
        assert router.chat().status_code == 200
    until_idle(router)


def test_what_a_router_cannot_have_servers_do_is_refused(router: Router) -> None:
    for path in ("/sleep?level=1", "/reset_prefix_cache"):
        answer = router.http.post(path)
        assert (answer.status_code, "at the servers" in answer.text) == (400, True), answer.text
    assert router.http.post("/sleep?level=0").status_code == 200
    assert router.chat().status_code == 503
    assert router.http.post("/wake_up").status_code == 200
    assert router.chat().status_code == 200


# --- names ---


def test_an_unknown_model_is_refused_here(router: Router, servers: list[FakeServer]) -> None:
    before = sum(len(server.asked) for server in servers)
    assert router.chat(model="other").status_code == 404
    assert sum(len(server.asked) for server in servers) == before


@pytest.mark.slow
def test_an_adapter_is_a_name_of_its_model() -> None:
    listed = ({"id": "base"}, {"id": "french", "parent": "base"})
    with fakes(2, models=listed) as servers, routing(*(server.url for server in servers)) as router:
        until_healthy(router, 2)
        entries = {entry["id"]: entry["parent"] for entry in router.http.get("/v1/models").json()["data"]}
        assert entries == {"base": None, "french": "base"}
        answers = [router.chat(model="french", text=str(number) * 900).json()["server"] for number in range(6)]
        assert len(set(answers)) == 1, "an adapter stays where it is loaded"
        assert {asked.fields["model"] for server in servers for asked in server.asked} == {"french"}
        servers[0].models = ({"id": "base"}, {"id": "dutch", "parent": "base"})
        wait_until(lambda: router.chat(model="dutch").status_code == 200, "the new adapter is there")
        assert {router.chat(model="french").json()["server"] for _ in range(5)} == {servers[1].port}


@pytest.mark.slow
def test_a_fall_back_serves_while_no_server_can() -> None:
    with (
        fakes(1, models=({"id": "small"},)) as [small],
        fakes(1, models=({"id": "large"},)) as [large],
        routing(small.url, large.url, "--fallback", "large=small") as router,
    ):
        until_healthy(router, 2)
        assert router.chat(model="large").json()["server"] == large.port
        large.kill()
        until_healthy(router, 1)
        assert router.chat(model="large", keep=[1, {"a": "é"}]).json()["server"] == small.port
        assert small.asked[-1].fields["model"] == "small"
        assert small.asked[-1].fields["keep"] == [1, {"a": "é"}]
        large.start()
        until_healthy(router, 2)
        assert router.chat(model="large").json()["server"] == large.port


# --- servers that come and go ---


@pytest.mark.slow
def test_a_killed_server_loses_no_request_silently() -> None:
    with fakes(2) as servers, routing(*(server.url for server in servers)) as router:
        until_healthy(router, 2)
        with ThreadPoolExecutor(40) as clients:
            waiting = [clients.submit(router.chat, "wait") for _ in range(20)]
            wait_until(lambda: sum(len(server.asked) for server in servers) == 20, "all requests are at the servers")
            begun = len(servers[0].asked)
            servers[0].kill()
            others = [clients.submit(router.chat) for _ in range(20)]
            assert {other.result().status_code for other in others} == {200}
            servers[1].wait.set()
            codes = Counter(request.result().status_code for request in waiting)
        assert codes == {502: begun, 200: 20 - begun}
        servers[0].start()
        until_healthy(router, 2)


@pytest.mark.slow
def test_a_server_that_drains_gets_no_more_requests() -> None:
    with fakes(2) as servers, routing(*(server.url for server in servers)) as router:
        until_healthy(router, 2)
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(router.chat, "wait")
            wait_until(lambda: servers[0].asked or servers[1].asked, "the request is at a server")
            leaving, staying = servers if servers[0].asked else reversed(servers)
            leaving.health = 503
            until_healthy(router, 1)
            assert {router.chat().json()["server"] for _ in range(5)} == {staying.port}
            leaving.wait.set()
            assert waiting.result().json()["server"] == leaving.port


@pytest.mark.slow
def test_checks_leave_no_connections() -> None:
    with fakes(1) as [server], routing(server.url):
        wait_until(lambda: server.checks > 15, "the server was checked often")
        assert server.connections <= 3


def test_sessions_and_prefixes_stay_with_their_servers(router: Router) -> None:
    def server_of(text: str, **headers: str) -> int:
        body = {"model": "model", "messages": [{"role": "user", "content": text}]}
        found: int = router.http.post("/v1/chat/completions", json=body, headers=headers).json()["server"]
        return found

    homes = [server_of(letter * 2000) for letter in "abcd"]
    assert len(set(homes)) == 2
    for turn in range(5):
        assert [server_of(letter * 2000 + str(turn)) for letter in "abcd"] == homes
    assert len({server_of(str(turn), **{"x-session-id": "s"}) for turn in range(6)}) == 1


@pytest.mark.slow
def test_many_clients_at_a_time(router: Router) -> None:
    with ThreadPoolExecutor(100) as clients:
        codes = Counter(answer.status_code for answer in clients.map(lambda _: router.chat(), range(500)))
    assert codes == {200: 500}
    until_idle(router)


# --- keys ---


@pytest.mark.slow
def test_keys_and_their_limits(tmp_path: Path) -> None:
    keys, usage = tmp_path / "keys.toml", tmp_path / "usage.json"
    keys.write_text(KEYS)
    arguments = ["--keys", str(keys), "--usage-file", str(usage)]
    with fakes(1, models=({"id": "model"}, {"id": "other"})) as [server]:
        with routing(server.url, *arguments) as router:
            wait_until(lambda: router.chat(key="spent-key").status_code == 200, "the server is healthy")
            assert router.chat().status_code == router.chat(key="no").status_code == 401
            assert router.http.get("/v1/models").status_code == 401
            assert router.chat(key="small-key", model="other").status_code == 403
            sneaking = {"params": {"model_name": "other"}, "headers": {"authorization": "Bearer small-key"}}
            assert router.http.post("/v1/completions", json={"model": "model"}, **sneaking).status_code == 403
            headers = {"authorization": "Bearer small-key", "content-type": "application/json"}
            twice = '{"model": "other", "mod\\u0065l": "model", "n": 1.0e0}'
            assert router.http.post("/v1/completions", content=twice, headers=headers).status_code == 200
            assert server.asked[-1].body == b'{"model":"model","n":1.0e0}'
            before = len(server.asked)
            sneaking = {"params": {"model_name": "model"}, "headers": headers}
            for body in (
                b'{"model": "other", "n": NaN}',
                b"\xff\xfe" + '{"model": "other"}'.encode("utf-16-le"),
                b'[{"model": "other"}]',
            ):
                assert router.http.post("/v1/completions", content=body, **sneaking).status_code == 400
            sneaking["headers"] = {"authorization": "Bearer small-key"}
            for models in (["other"], ["model", "other"], []):
                form: dict[str, Any] = {"files": {"file": b"x"}, "data": {"model": models}, **sneaking}
                answer = router.http.post("/v1/audio/transcriptions", **form)
                assert (answer.status_code, "some models only" in answer.text) == (400, True), answer.text
            assert len(server.asked) == before
            form["data"] = {"model": "model"}
            assert router.http.post("/v1/audio/transcriptions", **form).status_code == 200
            assert router.chat(key="small-key").status_code == 429
            assert int(router.chat(key="small-key").headers["retry-after"]) in range(1, 61)
            assert router.chat(key="spent-key").status_code == 429, "the first answer took 12 tokens"
            assert {asked.header("authorization") for asked in server.asked} == {None}
            keys.write_text(KEYS.replace("tokens_per_day = 10", "tokens_per_day = 100"))
            router.log.wait_for("was loaded again")
            assert router.chat(key="spent-key").status_code == 200
            keys.write_text("[keys]\nsmall = 1")
            router.log.wait_for("the keys from before are valid")
            assert router.chat(key="spent-key").status_code == 200
        assert json.loads(usage.read_text())["spent"]["of_day"] == 36
        keys.write_text(KEYS)
        with routing(server.url, *arguments) as router:
            wait_until(lambda: router.chat(key="spent-key").status_code == 429, "what was spent stays spent")


@pytest.mark.slow
def test_the_example_of_the_document(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    keys = tmp_path / "keys.toml"
    keys.write_text(text.partition("<!-- keys.toml -->\n```toml\n")[2].partition("```")[0])
    line = next(line for line in text.splitlines() if line.startswith("    lmi-server route") and "--keys" in line)
    _, _, _, *options = line.replace("keys.toml", str(keys)).replace("usage.json", str(tmp_path / "usage.json")).split()
    with fakes(1, models=({"id": "llama"}, {"id": "small"})) as [server], routing(server.url, *options) as router:
        wait_until(lambda: router.chat(model="llama", key="test").status_code == 200, "the server is healthy")
        assert router.chat(model="small", key="test").status_code == 403
        assert router.chat(model="small", key="a-key-for-the-batch-jobs").status_code == 200
        assert router.chat(model="small").status_code == 401


@pytest.mark.slow
def test_keys_take_turns_and_have_priorities(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.a]\nkey = "a"\n[keys.b]\nkey = "b"\n[keys.late]\nkey = "late"\npriority = 9\n')
    with fakes(1) as [server], routing(server.url, "--keys", str(keys), "--max-concurrent", "1") as router:
        wait_until(lambda: router.chat(key="a").status_code == 200, "the server is healthy")
        with ThreadPoolExecutor(20) as clients:
            clients.submit(router.chat, "wait", key="a")
            wait_until(lambda: len(server.asked) == 2, "the server has one request")
            for count, key in enumerate(("late", "a", "a", "a", "b"), 1):
                clients.submit(router.chat, key=key, user=key)
                until_queued(router, count)
            server.wait.set()
        assert "".join(asked.fields["user"][0] for asked in server.asked[2:]) in ("abaal", "baaal", "aabal")


def until_queued(router: Router, count: int) -> None:
    def queued() -> bool:
        metrics = router.http.get("/metrics").text
        return any(line.startswith("lmi_queue_depth") and line.endswith(f" {count}.0") for line in metrics.splitlines())

    wait_until(queued, f"{count} requests wait")


@pytest.mark.slow
def test_the_key_of_the_servers_takes_the_place_of_the_clients(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("of-the-servers\n")
    with fakes(1) as [server], routing(server.url, "--backend-key-file", str(file)) as router:
        wait_until(lambda: router.chat(key="of-the-client").status_code == 200, "the server is healthy")
        assert server.asked[-1].header("authorization") == "Bearer of-the-servers"


@pytest.mark.slow
def test_the_end_of_a_router_finishes_what_runs() -> None:
    with fakes(1) as [server], routing(server.url) as router:
        until_healthy(router, 1)
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(router.chat, "wait")
            wait_until(lambda: server.asked, "the request is at the server")
            router.process.terminate()
            router.is_ending = True
            router.log.wait_for("draining")
            threading.Timer(0.2, server.wait.set).start()
            assert waiting.result().status_code == 200

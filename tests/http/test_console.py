"""The console without a browser: its page, who gets what, and the events that keep it as the server is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from paths import ROOT
from relay_helpers import on_loop
from server_helpers import Server, make_model, request, running
from waiting import wait_until

from frontend.console.feed import ConsoleFeed
from frontend.observability.metrics.collector import Metrics
from frontend.observability.server_log import LogTail, WrittenLines, background_log

REMOTE = {"x-forwarded-for": "203.0.113.7"}  # what a proxy on this machine says of a client elsewhere
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEY, ADMIN = "key-for-requests", "key-of-the-admin"
CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
STATIC = ROOT / "frontend" / "console" / "static"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("console")
    model = make_model(directory / "model", max_rolling_batch_size=7, revision="hf_planted_secret")
    make_model(directory / "second")
    with running(model, variables={"HF_TOKEN": "hf_planted_secret"}, workers=1) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve with keys, and the management API on a port of its own, to which `http` speaks."""
    variables = {
        "SERVING_API_KEYS": KEY,
        "SERVING_MANAGEMENT_API_KEYS": ADMIN,
        "SERVING_MANAGEMENT_PORT": "0",
    }
    with running(make_model(tmp_path_factory.mktemp("guarded") / "model"), variables=variables) as server:
        port = server.log_line(r"listening on http://127\.0\.0\.1:(\d+) for management")[1]
        server.log_line(r"\] ready: process")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as managing:
            serving, server.http = server.http, managing
            yield server
            server.http = serving


@contextlib.contextmanager
def events(server: Server, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Look at the console; yield what its events say."""
    with server.http.stream("GET", "/console/live", headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


# --- the page ---


def test_everything_that_the_page_names_is_served_under_a_strict_policy(server: Server) -> None:
    page = server.http.get("/console")
    named = set(re.findall(r'(?:src|href)="(console/[^"]+)"', page.text))
    modules = {
        f"console/{name}" for path in STATIC.glob("*.js") for name in re.findall(r'"\./(.+?\.js)"', path.read_text())
    }
    assert {"console/console.js", "console/uPlot.iife.min.js"} <= named
    assert "console/htm-preact.js" in modules
    kinds = {"js": "text/javascript", "css": "text/css"}
    for path in named | modules:
        answer = server.http.get(f"/{path}")
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (
            200,
            kinds[path.rpartition(".")[2]],
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src 'self';" in policy


def test_the_page_is_complete_without_inline_code_or_network() -> None:
    """The policy would block inline code, and the user has no other network than the server."""
    page = (STATIC / "console.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page) == []
    own = [path for path in STATIC.iterdir() if path.suffix in (".html", ".css", ".js") and path.stem != "htm-preact"]
    assert {path.name: found for path in own if (found := re.findall(r"https?://[^\s\"'`]+", path.read_text()))} == {}


def test_a_browser_is_led_to_the_console_and_others_are_not(server: Server) -> None:
    led = server.http.get("/", headers=BROWSER)
    assert (led.status_code, led.headers["location"]) == (307, "console")
    assert server.http.get("/").status_code == 404
    assert server.http.post("/", json=request("a b", 2), headers=BROWSER).json() == [{"generated_text": " a b"}]
    slash = server.http.get("/console/")
    assert (slash.status_code, slash.headers["location"]) == (307, "../console")


def test_the_console_is_switched_off_by_a_key() -> None:
    with running(variables={"SERVING_CONSOLE": "false"}) as server:
        for path in ("/console", "/console/live", "/console/models/model", "/console/console.js"):
            assert server.http.get(path, headers=BROWSER).status_code == 404, path
        assert server.http.get("/", headers=BROWSER).status_code == 404
        assert server.http.post("/console/chat/completions", json=CHAT).status_code == 404


# --- who gets what ---


@pytest.mark.parametrize("path", ["/console", "/console/console.js", "/console/live", "/console/models/model"])
def test_without_keys_only_this_machine_gets_it(server: Server, path: str) -> None:
    refused = server.http.get(path, headers=REMOTE)
    assert refused.status_code == 403
    assert "management_api_keys" in refused.json()["message"]


def test_no_page_of_another_site_reads_or_chats(server: Server) -> None:
    other = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    assert server.http.get("/console/live", headers=other).status_code == 403
    assert server.http.post("/console/chat/completions", json=CHAT, headers=other).status_code == 403


def test_with_keys_the_page_is_for_all_and_what_it_asks_for_is_not(guarded: Server) -> None:
    assert guarded.http.get("/console", headers=REMOTE).status_code == 200
    for key in ({}, {"authorization": f"Bearer {KEY}"}):
        assert guarded.http.get("/console/live", headers=key).status_code == 401
        assert guarded.http.get("/console/models/model", headers=key).status_code == 401
        assert guarded.http.post("/console/chat/completions", json=CHAT, headers=key).status_code == 401
    admin = {"authorization": f"Bearer {ADMIN}", **REMOTE}
    assert guarded.http.get("/console/models/model", headers=admin).status_code == 200
    with events(guarded, **admin) as seen:
        assert [model["label"] for model in next(seen)["models"]] == ["model"]
    answer = guarded.http.post("/console/chat/completions", json=CHAT, headers=admin)
    assert answer.json()["choices"][0]["message"]["content"] == " a b"


def test_it_is_where_the_management_api_is(guarded: Server) -> None:
    serving = f"http://127.0.0.1:{guarded.port}"
    key = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{serving}/console", headers={**key, **BROWSER}).status_code == 404
    assert httpx.get(f"{serving}/", headers={**key, **BROWSER}).status_code == 404
    assert httpx.post(f"{serving}/console/chat/completions", json=CHAT, headers=key).status_code == 404
    assert guarded.http.get("/", headers=BROWSER).headers["location"] == "console"


# --- what it shows ---


def test_the_last_minutes_are_there_before_a_page_opens(server: Server) -> None:
    """Nobody looks while requests are answered; a page that opens later has their figures all the same."""
    for _ in range(3):
        assert server.invoke("a b", 5).status_code == 200

    def points(model: str) -> list[dict[str, float | None]]:
        found = server.http.get("/console/history", params={"model": model}).json()
        return [dict(zip(found["columns"], point, strict=True)) for point in found["points"]]

    wait_until(lambda: any(point["requests"] for point in points("")), "the requests are in the history")
    assert any(point["ttft_p50"] for point in points("model"))
    times = [point["time"] or 0 for point in points("")]
    assert times == sorted(times)
    assert points("no such model") == []


def test_a_model_that_is_loading_says_how_far_it_is(server: Server, tmp_path: Path) -> None:
    url = str(make_model(tmp_path / "slow", "fault_handlers:GatedHandler"))
    with events(server) as seen:
        next(seen)
        assert server.http.post("/models", params={"url": url, "synchronous": "false"}).status_code == 202
        rows = (row for event in seen for row in event["models"] if row["label"] == "slow")
        loading = next(row["loading"] for row in rows if row["loading"]["what"] == "starting its workers")
        assert time.time() - 60 < loading["since"] <= time.time()
        assert server.http.delete("/models/slow").status_code == 200
        next(event for event in seen if event["whole"] and len(event["models"]) == 1)


def test_the_events_follow_the_server(server: Server) -> None:
    with events(server) as seen:
        first = next(seen)
        assert first["whole"]
        assert first["server"]["version"]
        (model,) = first["models"]
        assert (model["label"], model["status"], model["workers"]["ready"]) == ("model", "Healthy", 1)
        assert any("listening on" in line for _, line in first["log"])
        asked = {**request("a b", 400, stream=True)}
        streaming = threading.Thread(target=lambda: server.http.post("/invocations", json=asked))
        streaming.start()
        counted = next(event for event in seen if any(row.get("requests") for row in event["models"]))
        streaming.join()
        assert counted["totals"]["requests"] > 0
        assert not counted["whole"]
        quiet = next(event for event in seen if not event["models"])
        assert quiet["log"] == []  # what was sent is not sent again


def test_a_model_that_comes_and_goes_is_in_the_events(server: Server, tmp_path: Path) -> None:
    with events(server) as seen:
        next(seen)
        url = str(make_model(tmp_path / "guest"))
        assert server.http.post("/models", params={"url": url, "synchronous": "false"}).status_code == 202
        came = next(event for event in seen if event["whole"])
        assert [row["label"] for row in came["models"]] == ["guest", "model"]
        wait_until(lambda: server.http.get("/models/guest").json()[0]["models"][0]["status"] == "Healthy", "it serves")
        assert server.http.delete("/models/guest").status_code == 200
        went = next(event for event in seen if event["whole"] and len(event["models"]) == 1)
        assert went["models"][0]["label"] == "model"


def test_the_details_name_layers_and_hide_secrets(server: Server) -> None:
    answer = server.http.get("/console/models/model")
    details = answer.json()
    options = {option["key"]: option for option in details["options"]}
    batch = options["option.max_rolling_batch_size"]
    assert (batch["value"], batch["layer"]) == (7, "serving.properties")
    assert batch["place"].endswith("serving.properties:3")
    assert options["option.dtype"]["layer"] == "default"
    assert options["option.revision"]["value"] == "***"
    assert "hf_planted_secret" not in answer.text
    assert details["workerGroups"][0]["workers"][0]["requestsInFlight"] == 0
    assert details["memory"]["available_bytes"] > 0
    assert details["resident"]["model-0"] > 1 << 20
    assert server.http.get("/console/models/none").status_code == 404


def test_the_details_of_a_model_without_a_version_are_not_those_of_versions_beside_it(server: Server) -> None:
    url = server.http.get("/models/model").json()[0]["models"][0]["modelUrl"]
    beside = server.http.post("/models", params={"url": url, "model_name": "model", "model_version": "2"})
    assert beside.status_code == 200, beside.text
    try:
        details = [server.http.get(f"/console/models/model{path}").json() for path in ("", "", "", "/2")]
        assert [each["loadedAtStartup"] for each in details] == [True, True, True, False]
    finally:
        assert server.http.delete("/models/model", params={"model_version": "2"}).status_code == 200


def test_the_log_shows_no_secret(server: Server, tmp_path: Path) -> None:
    unreadable = tmp_path / "hf_planted_secret"
    assert server.http.post("/models", params={"url": str(unreadable), "synchronous": "false"}).status_code == 202
    with events(server) as seen:
        lines = [line for event in (next(seen), next(seen)) for _, line in event["log"]]
    assert any("could not be loaded" in line for line in lines)
    assert not any("hf_planted_secret" in line for line in lines)
    server.http.delete("/models/hf_planted_secret")


def test_a_chat_is_answered_as_that_of_openai(server: Server) -> None:
    answer = server.http.post("/console/chat/completions", json={**CHAT, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    unknown = server.http.post("/console/chat/completions", json={**CHAT, "model": 1})
    assert (unknown.status_code, "error" in unknown.json()) == (400, True)


def test_open_pages_do_not_hold_up_the_end_of_the_server() -> None:
    with running(variables={"SERVING_DRAIN_TIMEOUT": "600"}) as server:
        with events(server) as seen:
            next(seen)
            server.process.terminate()
            assert len(list(itertools.islice(seen, 30))) < 30
        assert server.ended() == 0


# --- the feed alone ---


@contextlib.asynccontextmanager
async def sampling(feed: ConsoleFeed) -> AsyncIterator[None]:
    """Let the feed sample meanwhile."""
    running = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@on_loop
async def test_one_sampler_serves_all_pages() -> None:
    reads = []
    feed = ConsoleFeed(lambda: reads.append(1) or (), Metrics(lambda: ()), LogTail())  # type: ignore[func-returns-value]
    pages = [feed.events() for _ in range(3)]
    async with sampling(feed):
        for page in pages:
            await anext(page)
        before = len(reads)
        await asyncio.gather(*(anext(page) for page in pages))
        assert len(reads) == before + 1
        for page in pages:
            await page.aclose()


@on_loop
async def test_a_page_that_reads_slowly_gets_what_it_missed_at_once() -> None:
    tail = LogTail()
    feed = ConsoleFeed(lambda: (), Metrics(lambda: ()), tail)
    slow, quick = feed.events(), feed.events()
    async with sampling(feed):
        await anext(slow)
        for number in range(3):
            tail.add(f"line {number}\n".encode())
            await anext(quick)
        seen = json.loads((await anext(slow)).removeprefix(b"data: "))
        assert [line for _, line in seen["log"]] == ["line 0", "line 1", "line 2"]
        for page in (slow, quick):
            await page.aclose()


@on_loop
async def test_the_end_reaches_a_page_whenever_it_opens() -> None:
    feed = ConsoleFeed(lambda: (), Metrics(lambda: ()), LogTail())
    early = feed.events()
    async with sampling(feed):
        await anext(early)
        feed.close()
        assert [message async for message in early] == []
        assert [message async for message in feed.events()] == []


def test_the_tail_of_the_log_is_bounded() -> None:
    tail = LogTail()
    for number in range(2000):
        tail.add(f"{number} {'x' * 10000}\n".encode())
    kept = tail.since(0)
    assert [number for number, _ in kept] == list(range(1501, 2001))
    assert max(len(line) for _, line in kept) == 4096
    assert tail.since(1999)[0][1].startswith("1999 ")


def test_the_tail_keeps_the_last_of_many_lines_and_records_as_they_were() -> None:
    tail = LogTail()
    tail.add(b"".join(b"line %d\n" % number for number in range(1000)), 1000)
    tail.add(b"an error\n  with a traceback\n")
    tail.add(b"a\nb\n", 2)
    kept = tail.since(0)
    assert [number for number, _ in kept] == list(range(504, 1004))
    assert [line for _, line in kept][-4:] == ["line 999", "an error\n  with a traceback", "a", "b"]
    assert tail.since(1002) == [(1003, "b")]
    assert tail.since(1003) == []


def test_the_tail_has_each_line_of_a_record_of_many(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as output, background_log(output.fileno(), "json") as log:
        logging.getLogger("many").handle(WrittenLines("many", b"".join(b"line %d\n" % number for number in range(600))))
    assert [line for _, line in log.tail.since(0)][-500:] == [f"line {number}" for number in range(100, 600)]
    assert len((tmp_path / "log").read_bytes().splitlines()) == 600

"""The console in a browser: pages of requests, the last hour, names that are markup, and what axe-core finds."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from console_browser import MESSAGE, NARROW, WIDE, ask, chromium, opened, tell
from paths import ROOT
from server_helpers import Server, make_model, request, running
from waiting import wait_until

from scripts.console_pictures import PICTURES, take

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

AXE = ROOT / ".venv" / "axe-core" / "axe.min.js"
MARKUP = "<img src=x onerror=alert(1)>"
SPREAD = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve an echo model that has answered some requests, and refused one."""
    model = make_model(tmp_path_factory.mktemp("pages") / "model", echo_delay_ms=5, enable_lora=True)
    with running(model, workers=1) as server:
        for number in range(60):
            server.http.post("/invocations", json=request("a b", 3), headers={"x-request-id": f"{MARKUP}{number}"})
        server.http.post("/models/none/invocations", json=request("a b", 3), headers={"x-request-id": "lost"})
        wait_until(lambda: server.http.get("/console/requests").json()["kept"] >= 60, "the requests are kept")
        yield server


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core; make setup brings it where npm is")
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, server: Server, scheme: str, viewport: dict[str, int]) -> None:
    with opened(browser, server, color_scheme=scheme, viewport=viewport) as page:
        found = {
            "models": faults(page),
            **{part: look(page, part) for part in ("live", "requests", "request/1", "model/model", "model/none")},
            "chat": look(page, "chat"),
        }
        page.get_by_text("Parameters").click()
        page.get_by_role("checkbox", name="Two models").check()
        page.get_by_role("checkbox", name="Probabilities").check()
        ask(page, "one two")
        page.get_by_text("ended by length").nth(1).wait_for()
        found["answers"] = faults(page)
        page.get_by_role("button", name="Key").click()
        found["key"] = faults(page)
        assert {part: names for part, names in found.items() if names} == {}


def look(page: Page, part: str) -> list[str]:
    page.evaluate(f"location.hash = '{part}'")
    page.get_by_role("heading", level=2).first.wait_for()
    if part == "model/model":
        page.get_by_role("heading", name="Configuration").wait_for()
    if part.startswith("request"):
        page.get_by_role("table").first.wait_for()
    return faults(page)


def faults(page: Page) -> list[str]:
    """Return what axe-core finds, each with the elements."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [f"{each['id']}: {[node['html'][:200] for node in each['nodes'][:3]]}" for each in found]


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_request_is_found_and_shows_where_its_time_went(
    browser: Browser, server: Server, viewport: dict[str, int]
) -> None:
    with opened(browser, server, viewport=viewport) as page:
        page.get_by_role("link", name="Requests", exact=True).click()
        page.get_by_role("caption").get_by_text(re.compile(r"\d\d requests, page 1 of 2")).wait_for()
        page.get_by_role("button", name="Next").click()
        page.get_by_role("caption").get_by_text("page 2 of 2").wait_for()
        page.get_by_role("searchbox", name="Id has").fill(f"{MARKUP}42")
        page.get_by_role("caption").get_by_text("1 request;").wait_for()
        assert page.evaluate(SPREAD) <= viewport["width"]
        page.get_by_role("table").get_by_role("link").click()
        page.get_by_text(f"{MARKUP}42", exact=True).wait_for()
        bars = page.locator(".stages .bar")
        assert bars.count() == 5
        boxes = [bar.bounding_box() or {} for bar in bars.all()]
        assert [box["x"] for box in boxes] == sorted(box["x"] for box in boxes)
        decode = page.get_by_role("img", name=re.compile("^Decode: from")).bounding_box() or {}
        queue = page.get_by_role("img", name=re.compile("^Queue: from")).bounding_box() or {}
        assert decode["width"] > queue["width"]  # tokens take 5 ms each, and no other request waited
        assert page.get_by_text("Body", exact=True).count() == 0
        assert page.evaluate(SPREAD) <= viewport["width"]
        assert page.locator("main img, main script").count() == 0
        page.get_by_role("link", name="All requests").click()
        page.get_by_role("caption").get_by_text("1 request;").wait_for()  # the filter stays
        page.evaluate("location.hash = 'request/123456'")
        page.get_by_role("alert").get_by_text("request 123456 is not kept").wait_for()


def test_a_new_version_is_tried_and_taken_back_on_the_page(browser: Browser, server: Server) -> None:
    with opened(browser, server, viewport=NARROW) as page:
        page.evaluate("location.hash = 'model/model'")
        page.get_by_role("combobox", name="The new version gets").select_option(label="a share of them first")
        page.get_by_role("textbox", name="Share in %").fill("50")
        page.get_by_role("textbox", name="Judged after requests").fill("1000")
        page.get_by_role("button", name="Load it again").click()
        page.get_by_text("50 % of the requests go to it. It is judged after 1,000 requests").wait_for()
        for _ in range(20):
            assert server.invoke("a b", 3).status_code == 200
        new = page.get_by_role("row", name=re.compile("^New [1-9]"))
        new.get_by_text(re.compile(r"^[\d.]+ ms$")).wait_for()  # the median latency
        page.get_by_role("heading", name="model Healthy, a new version is tried").wait_for()
        assert page.evaluate(SPREAD) <= NARROW["width"]
        assert not AXE.exists() or faults(page) == []
        page.get_by_role("button", name="Take back").click()
        page.get_by_text("Taken back: a call asked for it.").wait_for()
        assert page.get_by_role("button", name="Promote").count() == 0
        page.get_by_role("combobox", name="The new version gets").select_option(label="all requests, once it is loaded")
        page.get_by_role("button", name="Load it again").click()
        page.get_by_text("Loaded again at").wait_for()


@pytest.mark.parametrize("status", ["RUNNING", "TAKEN_BACK", MARKUP])
def test_what_a_trial_says_stays_text(browser: Browser, server: Server, status: str) -> None:
    """A reason is what the handler of a model says."""
    figures = {"requests": 2, "errors": 1, "refused": 0, "medianMs": None, "intervalMs": [1.0, 2.0]}
    trial = {"status": status, "kind": "canary", "sharePercent": 5, "judgedAfter": 200, "secondsLeft": 9.0,
             "reason": MARKUP * 99, "old": figures, "new": figures}  # fmt: skip
    reload = {"status": "FAILED", "startTime": "2026-01-01T00:00:00Z", "reason": MARKUP}
    with opened(browser, server, viewport=NARROW) as page:
        found = server.http.get("/console/models/model").json() | {"canary": trial, "reload": reload}
        own = [{"workflowName": "model", "version": "2", "models": [{}]}, {"workflowName": "model", "models": [found]}]
        page.route("**/models/model", lambda route: route.fulfill(json=own))
        page.route("**/console/models/model", lambda route: route.fulfill(json=found))
        page.evaluate("location.hash = 'model/model'")
        page.get_by_role("heading", name="New version").wait_for()
        page.get_by_role("row", name=re.compile("^New 2")).wait_for()
        assert page.get_by_text(MARKUP * 99).count() == (status != "RUNNING")
        assert page.get_by_role("button", name="Promote").count() == (status == "RUNNING")
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate(SPREAD) <= NARROW["width"]


def test_the_last_hour_is_drawn(browser: Browser, server: Server) -> None:
    with opened(browser, server, "#live") as page:
        chart = page.get_by_role("img", name="Requests/s")
        chart.locator("canvas").wait_for()
        page.get_by_role("combobox", name="Time").select_option(label="last hour")
        page.get_by_text("A point is ten seconds").wait_for()
        chart.locator("canvas").wait_for()
        page.get_by_role("combobox", name="Model").select_option("model")
        chart.locator("canvas").wait_for()
        page.get_by_role("combobox", name="Time").select_option(label="last five minutes")
        chart.locator("canvas").wait_for()


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_names_that_are_markup_stay_text(browser: Browser, server: Server, viewport: dict[str, int]) -> None:
    """No such name can be registered; the page must not count on that."""
    loading = {"since": 1, "what": MARKUP, "unit": MARKUP, "done": 1, "total": 3, "rate": 0.1, "left": 20.0}
    rows = [
        {"label": f"{MARKUP}{number}", "name": f"{MARKUP}{number}", "version": None, "status": status, "reason": MARKUP,
         "handler": MARKUP, "loading": loading, "reloading": False, "workers": {"ready": 1}, "queue": 0, "running": 0,
         "adapters": 0, "kv": None, "tokens": 1.0}
        for number, status in enumerate(("PENDING", "FAILED", "Healthy", "Unhealthy") * 15)
    ]  # fmt: skip
    message = {**MESSAGE, "models": rows, "log": [[1, MARKUP]]}
    with opened(browser, server, viewport=viewport) as page:
        tell(page, message)
        page.get_by_text("60 models, page 1 of 2").wait_for()
        for part in ("models", f"model/{MARKUP}0", "live", "requests", "chat"):
            page.evaluate(f"location.hash = {json.dumps(part)}")
            page.get_by_role("heading", level=2).first.wait_for()
            page.get_by_text(MARKUP).first.wait_for(state="attached")
            assert page.locator("main img, main script").count() == 0, part
            assert page.evaluate(SPREAD) <= viewport["width"], part


def test_a_server_that_starts_anew_is_followed(browser: Browser, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with contextlib.ExitStack() as first:
        server = first.enter_context(running(model))
        server.log_line(r"\] ready: process")
        server.invoke("a b", 3)
        wait_until(lambda: server.http.get("/console/requests").json()["kept"] == 1, "the request is kept")
        with opened(browser, server, "#requests") as page:
            page.get_by_role("caption").get_by_text("1 request;").wait_for()
            first.close()
            page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
            # The port of the tests' servers is the system's choice, so the answers of the next one are made here.
            none = {"kept": 0, "ended": 0, "matching": 0, "page": 0, "pages": 1, "rows": []}
            next_one = {**MESSAGE, "server": {"version": "1", "since": 2}}
            page.route("**/console/requests?*", lambda route: route.fulfill(json=none))
            page.route("**/console/live", lambda route: route.fulfill(body=f"data: {json.dumps(next_one)}\n\n"))
            page.get_by_role("caption").get_by_text("0 requests;").wait_for()


def test_the_pictures_of_the_docs_are_taken_by_a_command(browser: Browser, server: Server, tmp_path: Path) -> None:
    take(browser, f"http://127.0.0.1:{server.port}", tmp_path)
    docs = ROOT / "docs"
    for name in PICTURES:
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert width_of(picture) == width_of((docs / name).read_bytes())
        assert name in (docs / "console.md").read_text()


def width_of(picture: bytes) -> Any:
    return int.from_bytes(picture[16:20], "big")

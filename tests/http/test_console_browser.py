"""The console in a browser: headless Chromium on a server with an echo model, and on the demo model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from console_browser import MESSAGE, NARROW, WIDE, ask, chromium, opened, tell
from product_helpers import Server as Product
from product_helpers import serving
from server_helpers import Server, make_model, running
from waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request, Route

pytestmark = pytest.mark.slow

ADMIN = "key-of-the-admin"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve an echo model that takes 20 ms for each token."""
    model = make_model(tmp_path_factory.mktemp("browser") / "model", echo_delay_ms=20, enable_lora=True)
    with running(model, workers=1) as server:
        yield server


# --- how it looks ---


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_on_wide_and_narrow_screens(
    browser: Browser, server: Server, scheme: str, viewport: dict[str, int]
) -> None:
    with opened(browser, server, color_scheme=scheme, viewport=viewport) as page:
        for part in ("Models", "Live", "Requests", "Chat"):
            page.get_by_role("link", name=part, exact=True).click()
            page.get_by_role("heading", name=part, exact=True).wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], part
        before = brightness(page)
        assert (before > 128) == (scheme == "light")
        other = "Dark" if scheme == "light" else "Light"
        page.get_by_role("combobox", name="Theme").select_option(label=other)
        assert (brightness(page) > 128) != (scheme == "light")
        page.reload()
        assert (brightness(page) > 128) != (scheme == "light")  # it is remembered


def brightness(page: Page) -> float:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_the_text_has_contrast_in_both_themes(browser: Browser, server: Server) -> None:
    """WCAG asks for 4.5 between text and what is behind it."""
    for scheme in ("light", "dark"):
        with opened(browser, server, color_scheme=scheme) as page:
            found = page.evaluate(CONTRASTS)
            assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}, scheme


CONTRASTS = """() => {
  const colour = (name) => {
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
    probe.remove();
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = parts.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratios = {};
  for (const ink of ["--ink", "--quiet", "--accent", "--good", "--warn", "--bad"]) {
    for (const ground of ["--paper", "--panel"]) {
      const [low, high] = [colour(ink), colour(ground)].sort((one, other) => one - other);
      ratios[`${ink} on ${ground}`] = (high + 0.05) / (low + 0.05);
    }
  }
  return ratios;
}"""


def test_it_is_used_by_keyboard_alone(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        for _ in range(4):
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Chat", exact=True).wait_for()
        page.get_by_role("textbox", name="Message").focus()
        page.keyboard.type("one two")
        page.keyboard.press("Enter")
        page.get_by_text("ended by length").wait_for()


def test_every_control_has_a_name(browser: Browser, server: Server) -> None:
    """A screen reader says the name of a control; without a label it would only say what kind of control it is."""
    nameless = """() => [...document.querySelectorAll("input, select, textarea, button")].filter((control) =>
        !control.labels?.length && !control.getAttribute("aria-label") && !control.textContent.trim()).length"""
    with opened(browser, server) as page:
        for part in ("#models", "#live", "#requests", "#chat", "#model/model"):
            page.evaluate(f"location.hash = '{part}'")
            page.get_by_role("heading", level=2).first.wait_for()
            assert page.evaluate(nameless) == 0, part


# --- what stands out ---


@contextlib.contextmanager
def registered(server: Server, directory: Path, name: str, handler: str, **options: object) -> Iterator[None]:
    """Register a model without waiting for it; unregister it at the end."""
    url = str(make_model(directory / name, handler, **options))
    assert server.http.post("/models", params={"url": url, "synchronous": "false"}).status_code == 202
    yield
    server.http.delete(f"/models/{name}")


def test_failed_and_loading_models_stand_out_and_are_found(browser: Browser, server: Server, tmp_path: Path) -> None:
    with (
        registered(server, tmp_path, "failing", "fault_handlers:FailingHandler", retry_threshold=1),
        registered(server, tmp_path, "gated", "fault_handlers:GatedHandler"),
        opened(browser, server) as page,
    ):
        failing, gated = (
            page.get_by_role("row", name=re.compile("failing")),
            page.get_by_role("row", name=re.compile("gated")),
        )
        failing.get_by_text("Failed", exact=True).wait_for()
        gated.get_by_text("Loading", exact=True).wait_for()
        gated.get_by_text(re.compile(r"starting its workers; \d+ s so far")).wait_for()
        assert "the weights are missing" in failing.inner_text()
        ink = page.evaluate("getComputedStyle(document.body).color")
        healthy = page.locator(".state.Healthy").first
        colours = {colour(failing.locator(".state")), colour(gated.locator(".state")), colour(healthy), ink}
        assert len(colours) == 4
        page.get_by_role("status").filter(has_text="1 of 3 models can serve, 1 failed").wait_for()
        for state, name in (("Failed", "failing"), ("Loading", "gated"), ("Healthy", "model")):
            page.get_by_role("combobox", name="State").select_option(label=state)
            page.get_by_role("caption").get_by_text("1 model", exact=True).wait_for()
            page.get_by_role("link", name=name, exact=True).wait_for()
        page.get_by_role("combobox", name="State").select_option(label="Unhealthy")
        page.get_by_role("caption").get_by_text("0 models", exact=True).wait_for()
        page.evaluate("location.hash = 'model/gated'")
        note, figures = page.locator(".loading").bounding_box(), page.locator(".figures").first.bounding_box()
        assert note is not None
        assert figures is not None
        assert figures["y"] - note["y"] - note["height"] >= 6


def colour(place: Locator) -> str:
    return str(place.evaluate("element => getComputedStyle(element).color"))


def test_a_registration_is_followed_to_its_end(browser: Browser, server: Server, tmp_path: Path) -> None:
    """A screen reader hears what became of it: the region for it is there before, and only its text changes."""
    gated = make_model(tmp_path / "gated", "fault_handlers:GatedHandler")
    with opened(browser, server) as page:
        page.get_by_text("Register a model").click()
        said = page.locator(".outcome").get_by_role("status")
        failed = page.locator(".outcome").get_by_role("alert")

        def register(url: str) -> None:
            page.get_by_role("textbox", name="URL").fill(url)
            page.get_by_role("button", name="Register", exact=True).click()

        register(str(tmp_path / "<b>absent"))
        failed.get_by_text(re.compile("_b_absent could not be loaded: .*<b>absent")).wait_for()
        assert colour(failed) == colour(page.locator(".state.FAILED").first)
        assert said.inner_text() == ""
        register(str(gated))
        said.get_by_text("gated is loading.").wait_for()
        assert failed.count() == 0
        page.get_by_role("link", name="Live", exact=True).click()  # it goes on
        (gated / "go").touch()
        said.get_by_text("gated can serve.").wait_for()
        page.get_by_role("button", name="Dismiss").click()
        said.wait_for(state="hidden")
    for name in ("gated", "_b_absent"):
        assert server.http.delete(f"/models/{name}").status_code == 200


def test_the_progress_of_a_download_is_shown(browser: Browser, server: Server) -> None:
    loading = {
        "since": 40,
        "what": "fetching <i>a",
        "unit": "bytes",
        "done": 3 << 20,
        "total": 6 << 20,
        "rate": 1 << 18,
        "left": 12.0,
    }
    row = {"label": "a", "name": "a", "version": None, "status": "PENDING", "reason": "", "handler": "",
           "loading": loading, "reloading": False}  # fmt: skip
    with opened(browser, server) as page:
        tell(page, {**MESSAGE, "time": 100, "models": [row]})
        page.get_by_text("fetching <i>a: 3 MiB of 6 MiB (50 %), 0.3 MiB/s, 12 s left; 60 s so far").wait_for()
        assert page.get_by_role("progressbar").evaluate("bar => bar.position") == 0.5


def test_what_a_server_said_that_is_gone_is_marked(browser: Browser, tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model"), workers=1) as server, opened(browser, server) as page:
        figures = page.get_by_role("table")
        assert figures.evaluate("element => getComputedStyle(element).opacity") == "1"
        os.kill(server.process.pid, signal.SIGSTOP)  # it is silent, but its connections stay
        try:
            page.get_by_role("alert").get_by_text(re.compile(r"as it was at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d")).wait_for()
            assert float(figures.evaluate("element => getComputedStyle(element).opacity")) < 1
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        page.get_by_role("alert").wait_for(state="hidden")
        assert figures.evaluate("element => getComputedStyle(element).opacity") == "1"


# --- charts ---


def test_charts_begin_before_the_page_opens(browser: Browser, server: Server) -> None:
    assert server.invoke("a b", 20).status_code == 200
    wait_until(
        lambda: "requests" in server.http.get("/console/history").text and has_requests(server), "they are counted"
    )
    with opened(browser, server, "#live") as page:
        chart = page.get_by_role("img", name="Requests/s")
        chart.locator("canvas").wait_for()
        legend = chart.locator(".u-legend")
        legend.get_by_text(re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$")).wait_for()
        values = legend.locator(".u-value").all_inner_texts()
        assert len(values) == 2
        assert re.fullmatch(r"[\d.]+", values[1])
        assert page.get_by_text("exact to 2 %").is_visible()


def has_requests(server: Server) -> bool:
    found = server.http.get("/console/history").json()
    column = found["columns"].index("requests")
    return any(point[column] for point in found["points"])


def test_a_chart_of_nothing_has_no_scale(browser: Browser, tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model"), workers=1) as server, opened(browser, server, "#live") as page:
        page.get_by_text("Nothing in the last five minutes.").nth(5).wait_for()
        assert page.locator("canvas:visible").count() == 0
        assert server.invoke("a b", 5).status_code == 200
        page.get_by_role("img", name="Tokens/s").locator("canvas").wait_for()


# --- small screens, and the chat's models ---


def test_the_configuration_is_read_on_a_narrow_screen(browser: Browser, server: Server) -> None:
    with opened(browser, server, viewport=NARROW) as page:
        page.evaluate("location.hash = 'model/model'")
        row = page.get_by_role("row", name=re.compile(r"option\.echo_delay_ms"))
        row.get_by_text("Milliseconds before each token").wait_for()  # the meaning is not left out
        row.get_by_role("cell", name="20", exact=True).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        for part in [row.get_by_role("rowheader"), *row.get_by_role("cell").all()]:
            box = part.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= NARROW["width"]
            assert box["width"] > NARROW["width"] / 2  # no column of single letters


def test_cards_do_not_touch(browser: Browser, server: Server) -> None:
    gaps = """() => {
      const cards = [...document.querySelectorAll(".panel, .message, .figures, table")].filter((card) =>
        card.checkVisibility() && !card.parentElement.closest(".panel"));
      const boxes = cards.map((card) => card.getBoundingClientRect()).sort((one, other) => one.top - other.top);
      return boxes.slice(1).map((box, index) => box.top - boxes[index].bottom).filter((gap) => gap > -1);
    }"""
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        ask(page, "one")
        page.get_by_text("ended by length").wait_for()
        for part, shown in (("#chat", "Two models side by side"), ("#models", "Find"), ("#model/model", "Find a key")):
            page.evaluate(f"location.hash = '{part}'")
            page.get_by_label(shown, exact=True).wait_for()
            assert min(page.evaluate(gaps)) >= 6, part


def test_the_chat_has_every_model_and_two_side_by_side_differ(browser: Browser, server: Server, tmp_path: Path) -> None:
    with (
        registered(server, tmp_path, "another", "fault_handlers:FaultHandler"),
        registered(server, tmp_path, "gated", "fault_handlers:GatedHandler"),
        opened(browser, server) as page,
    ):
        page.get_by_role("row", name=re.compile("another.*Healthy")).wait_for()
        page.evaluate("location.hash = 'chat'")
        listed = page.get_by_role("combobox", name="Model").locator("option").all_inner_texts()
        assert listed == ["another", "gated (loading)", "model", "Another name, or an adapter"]
        page.get_by_role("checkbox", name="Two models").check()
        first, second = (page.get_by_role("combobox", name=f"Model {number}") for number in (1, 2))
        assert (first.input_value(), second.input_value()) == ("another", "model")
        first.select_option("model")
        assert (first.input_value(), second.input_value()) == ("model", "another")
        ask(page, "<u>who")
        page.get_by_text("ended by length").nth(1).wait_for()
        assert page.locator("section u").count() == 0


# --- what users and browsers do wrong ---


def test_a_browser_without_a_language_has_charts(browser: Browser, server: Server) -> None:
    """Chromium says en-US@posix where the machine has no locale, which is no language."""
    with opened(browser, server) as page:
        page.add_init_script('Object.defineProperty(Navigator.prototype, "language", { get: () => "en-US@posix" })')
        page.reload()
        page.evaluate("location.hash = 'live'")
        page.get_by_role("img", name="Requests: running").wait_for()
        page.get_by_role("log").get_by_text("listening on").wait_for()


def test_an_address_that_leads_nowhere_breaks_nothing(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'nothing'")
        page.get_by_role("heading", name="Models", exact=True).wait_for()
        page.evaluate("location.hash = 'model/%E0'")
        page.get_by_text("There is no model %E0.").wait_for()
        page.get_by_role("link", name="Chat", exact=True).click()
        page.get_by_role("heading", name="Chat", exact=True).wait_for()


def test_the_longest_names_stay_within_a_narrow_screen(browser: Browser, server: Server, tmp_path: Path) -> None:
    name = "n" * 255
    url = str(make_model(tmp_path / "model", enable_lora=True))
    query = {"url": url, "model_name": name, "synchronous": "true"}
    assert server.http.post("/models", params=query).status_code == 200
    adapter = {"name": "a" * 255, "src": str(tmp_path)}
    assert server.http.post(f"/models/{name}/adapters", json=adapter).status_code == 200
    with opened(browser, server, viewport=NARROW) as page:
        height = page.get_by_role("row", name=re.compile(name)).evaluate("row => row.clientHeight")
        assert height < NARROW["height"] / 3
        for part, heading in (("chat", "Chat"), ("live", "Live"), (f"model/{name}", re.compile(name))):
            page.evaluate(f"location.hash = '{part}'")
            page.get_by_role("heading", name=heading, level=2).wait_for()
            if part.startswith("model"):
                page.get_by_role("button", name="Unregister aaa").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], part
        page.get_by_role("button", name="Unregister", exact=True).click()
        assert page.get_by_role("dialog").evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")
    assert server.http.delete(f"/models/{name}").status_code == 200


def test_a_parameter_that_is_no_number_is_named(browser: Browser, server: Server) -> None:
    """JSON has no number for it: it would be sent as null, which is the default."""
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        page.get_by_text("Parameters").click()
        page.get_by_role("textbox", name="Seed").fill("0,5")
        ask(page, "one two")
        page.get_by_role("alert").get_by_text('Seed is "0,5"; it takes a number such as 0.5').wait_for()
        assert page.get_by_role("textbox", name="Message").input_value() == "one two"
        assert page.locator(".message").count() == 0
        page.get_by_role("textbox", name="Seed").fill("")
        page.get_by_role("combobox", name="Answer").select_option("json_schema")
        page.get_by_role("textbox", name="Schema").fill("{")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("alert").get_by_text("The schema is not valid JSON").wait_for()


def test_a_refused_question_is_not_sent_again(browser: Browser, server: Server) -> None:
    """An answer that never was would be one without text."""
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        page.get_by_text("Parameters").click()
        page.get_by_role("textbox", name="Top p").fill("7")
        ask(page, "refused")
        page.get_by_role("alert").get_by_text("top_p: 7 is not allowed").wait_for()
        page.get_by_role("textbox", name="Top p").fill("")
        with page.expect_request("**/console/chat/completions") as sent:
            ask(page, "taken")
        assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "taken"}]
        page.get_by_text("ended by length").wait_for()


def test_the_keyboard_stays_in_the_chat(browser: Browser, server: Server) -> None:
    """A button that is disabled under the focus loses it to the top of the page."""
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        message = page.get_by_role("textbox", name="Message")
        focused = "field => field === document.activeElement"
        page.get_by_text("Parameters").click()
        page.get_by_role("textbox", name="Maximum tokens").fill("100000")
        message.fill("without end")
        page.get_by_role("button", name="Send").press("Enter")
        page.locator(".assistant").get_by_text("without end").wait_for()
        assert message.evaluate(focused)
        page.get_by_role("button", name="Stop").press("Enter")
        page.get_by_text("Stopped.").wait_for()
        assert message.evaluate(focused)


def test_a_long_answer_is_followed_unless_the_reader_scrolls(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        in_view = "button => button.getBoundingClientRect().bottom <= innerHeight"
        stop = page.get_by_role("button", name="Stop")
        ask(page, "line\n" * 100)
        page.get_by_text("ended by length").wait_for()
        assert page.evaluate("document.documentElement.scrollHeight > 2 * innerHeight")
        assert stop.evaluate(in_view)
        ask(page, "line\n" * 100)
        page.locator(".assistant").nth(1).get_by_text("line").wait_for()
        page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
        page.get_by_text("ended by length").nth(1).wait_for()
        assert page.evaluate("scrollY") == 0


def test_the_log_stays_where_the_reader_is(browser: Browser, server: Server) -> None:
    with opened(browser, server, "#live") as page:
        log = page.get_by_role("log")
        log.get_by_text("listening on").wait_for()
        while not log.evaluate("log => log.scrollHeight > log.clientHeight"):
            fail_once(server, log)
        log.evaluate("log => { log.scrollTop = 0; }")
        fail_once(server, log)
        assert log.evaluate("log => log.scrollTop") == 0
        log.evaluate("log => { log.scrollTop = log.scrollHeight; }")
        fail_once(server, log)
        end = "log => log.scrollHeight - log.scrollTop - log.clientHeight < 2"
        wait_until(lambda: log.evaluate(end), "the end is shown")


def fail_once(server: Server, log: Locator) -> None:
    """Have the server write an error to its log, and wait until the page has it."""
    lines = log.get_by_text("raised before the first token")
    count = lines.count()
    assert server.invoke("raise").status_code == 424
    wait_until(lambda: lines.count() > count, "there are new lines")


def test_a_line_of_the_options_that_is_none_is_named(browser: Browser, server: Server, tmp_path: Path) -> None:
    guest = make_model(tmp_path / "guest")
    with opened(browser, server) as page:
        page.get_by_text("Register a model").click()
        page.get_by_role("textbox", name="URL").fill(str(guest))
        options, button = (
            page.get_by_role("textbox", name="Options"),
            page.get_by_role("button", name="Register", exact=True),
        )
        refused = page.get_by_role("alert")
        options.fill("option.dtype bf16")
        button.click()
        refused.get_by_text('"option.dtype bf16" is no option; it takes NAME=VALUE').wait_for()
        options.fill("url=/elsewhere")
        button.click()
        refused.get_by_text("url stands in the options and in a field of its own").wait_for()
        options.fill("# a comment\noption.max_rolling_batch_size=5")
        button.click()
        page.get_by_role("status").get_by_text("guest can serve.").wait_for()
        assert "comment" not in json.dumps(server.http.get("/console/models/guest").json()["warnings"])
    assert server.http.delete("/models/guest").status_code == 200


def test_a_registration_that_is_taken_back_elsewhere_does_not_load_for_ever(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    gated = make_model(tmp_path / "gated", "fault_handlers:GatedHandler")
    with opened(browser, server) as page:
        page.get_by_text("Register a model").click()
        page.get_by_role("textbox", name="URL").fill(str(gated))
        page.get_by_role("button", name="Register", exact=True).click()
        page.get_by_role("row", name=re.compile("gated.*Loading")).wait_for()
        assert server.http.delete("/models/gated").status_code == 200
        page.get_by_role("status").get_by_text("gated is no longer registered.").wait_for()


def test_a_key_that_no_header_takes_is_refused_by_the_form(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.get_by_role("button", name="Key").click()
        page.get_by_label("One of management_api_keys").fill("schlüssel")
        page.get_by_role("button", name="Use this key").click()
        assert page.get_by_label("One of management_api_keys").evaluate("field => field.validity.patternMismatch")
        assert page.get_by_role("dialog").is_visible()
        page.get_by_label("One of management_api_keys").fill("")
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("dialog").wait_for(state="hidden")


def test_the_page_of_a_model_waits_for_a_slow_server(browser: Browser, server: Server) -> None:
    """A new question while the first one is open would end that one, again and again."""
    held: list[Route] = []
    with opened(browser, server) as page:
        page.clock.install()
        page.route("**/console/models/model", lambda route: held.append(route))
        page.evaluate("location.hash = 'model/model'")
        wait_until(lambda: page.evaluate("1") and held, "the page asks")
        page.clock.run_for(30_000)
        assert len(held) == 1
        held[0].continue_()
        page.get_by_role("heading", name="Workers", exact=True).wait_for()
        page.unroute("**/console/models/model")


def test_a_call_to_a_server_that_is_gone_says_so(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.route("**/models?*", lambda route: route.abort())
        page.route("**/models", lambda route: route.abort())
        page.get_by_text("Register a model").click()
        page.get_by_role("textbox", name="URL").fill("anything")
        page.get_by_role("button", name="Register", exact=True).click()
        page.get_by_role("alert").get_by_text("The server does not answer.", exact=True).wait_for()


def test_an_answer_that_breaks_off_says_so(browser: Browser, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", echo_delay_ms=20)
    with running(model, workers=1) as server, opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        page.get_by_text("Parameters").click()
        page.get_by_role("textbox", name="Maximum tokens").fill("100000")
        ask(page, "without end")
        page.locator(".assistant").get_by_text("without end").wait_for()
        server.process.kill()
        assert server.ended() != 0
        page.locator(".assistant").get_by_role("alert").get_by_text("The connection broke.").wait_for()


def test_a_hidden_tab_holds_no_connection(browser: Browser, server: Server) -> None:
    """A browser has six connections to a server for all of its tabs."""
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""

    def is_live(request: Request) -> bool:
        return request.url.endswith("/console/live")

    with opened(browser, server) as page:
        with page.expect_event("requestfailed", is_live):
            page.evaluate(hide, True)
        with page.expect_request(is_live):
            page.evaluate(hide, False)
        page.get_by_role("status").filter(has_text="can serve").wait_for()


# --- what it does ---


def test_the_page_is_live(browser: Browser, server: Server) -> None:
    with opened(browser, server, "#live") as page:
        chart = page.get_by_role("img", name="Requests: running")
        chart.wait_for()
        assert page.locator("canvas").count() == 6
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            page.get_by_role("img", name="Requests: running 1").wait_for()
        page.get_by_role("log").get_by_text("listening on").wait_for()


def test_an_answer_is_streamed_and_never_becomes_markup(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        ask(page, "<img src=x onerror=alert(1)> <script>alert(2)</script> " + "word " * 60)
        answer = page.locator(".assistant")
        answer.get_by_text("word").wait_for()
        assert answer.get_attribute("aria-busy") == "true"  # its beginning is there before its end
        page.get_by_text("ended by length").wait_for()
        assert "<script>alert(2)</script>" in answer.inner_text()
        assert answer.locator("img, script").count() == 0
        assert "first token after" in answer.locator(".timings").inner_text()


def test_the_stop_button_cancels_the_request(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'chat'")
        page.get_by_text("Parameters").click()
        page.get_by_role("textbox", name="Maximum tokens").fill("100000")
        ask(page, "without end")
        page.locator(".assistant").get_by_text("without end").wait_for()
        assert server.metric("lmi_requests_in_flight") == 1
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
        server.until("lmi_requests_in_flight", 0)
        server.until("lmi_handler_running_requests", 0)
        assert page.get_by_role("button", name="Send").is_enabled()


def test_what_the_chat_sends(browser: Browser, server: Server) -> None:
    """The body is that of OpenAI's API with what the form says, for both models and with the messages from before."""
    picture = {"name": "dot.png", "mimeType": "image/png", "buffer": b"\x89PNG"}
    tool = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    chunk = {"choices": [{"index": 0, "delta": {"content": "hm", "tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    sent = []

    def answer(route) -> None:  # type: ignore[no-untyped-def]
        sent.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    with opened(browser, server) as page:
        page.route("**/console/chat/completions", answer)  # no model of the tests sees, or calls tools
        page.evaluate("location.hash = 'chat'")
        page.get_by_text("Parameters").click()
        page.get_by_role("textbox", name="System prompt").fill("Be brief.")
        page.get_by_role("textbox", name="Temperature").fill("0.5")
        page.get_by_role("textbox", name="Tools").fill(json.dumps(tool))
        page.get_by_role("combobox", name="Answer").select_option("json_schema")
        page.get_by_role("textbox", name="Schema").fill('{"type": "object"}')
        page.get_by_role("checkbox", name="Probabilities").check()
        page.get_by_role("checkbox", name="Two models").check()
        page.get_by_role("combobox", name="Model 2").select_option(label="Another name, or an adapter")
        page.get_by_role("textbox", name="Model 2").fill("other")
        page.get_by_label("Images").set_input_files([picture])  # type: ignore[list-item]
        page.get_by_role("button", name="Remove 1 image").wait_for()
        ask(page, "What time is it?")
        page.get_by_text('clock({"zone": "UTC"})').nth(1).wait_for()
        assert {body["model"] for body in sent} == {"model", "other"}
        first = sent[0]
        assert first["messages"][0] == {"role": "system", "content": "Be brief."}
        assert first["messages"][1]["content"][0] == {"type": "text", "text": "What time is it?"}
        assert first["messages"][1]["content"][1]["image_url"]["url"] == "data:image/png;base64,iVBORw=="
        assert (first["temperature"], first["stream"], first["logprobs"]) == (0.5, True, True)
        assert first["tools"] == tool
        assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
        assert "max_tokens" not in first
        ask(page, "Again")
        wait_until(lambda: page.evaluate("1") and len(sent) == 4, "the second messages are sent")
        assert [message["role"] for message in sent[2]["messages"]] == ["system", "user", "assistant", "user"]
        assert sent[2]["messages"][2]["tool_calls"][0]["function"]["name"] == "clock"
        page.get_by_role("textbox", name="Tools").fill("no json")
        ask(page, "Third")
        page.get_by_role("alert").get_by_text("The tools are not valid JSON").wait_for()
        assert len(sent) == 4


def test_a_model_is_registered_scaled_and_unregistered(browser: Browser, server: Server, tmp_path: Path) -> None:
    guest = make_model(tmp_path / "guest")
    with opened(browser, server) as page:
        page.get_by_text("Register a model").click()
        page.get_by_role("textbox", name="URL").fill(str(guest))
        page.get_by_role("textbox", name="Version").fill("2")
        page.get_by_role("textbox", name="Options").fill("option.max_rolling_batch_size=5\n\njob_queue_size = 9")
        page.get_by_role("button", name="Register", exact=True).click()
        page.get_by_role("status").get_by_text("guest:2 can serve.").wait_for()
        page.get_by_role("row", name=re.compile("guest:2.*Healthy")).get_by_role("link").click()
        row = page.get_by_role("row", name=re.compile(r"option\.max_rolling_batch_size"))
        assert re.search(r"5\s+registration", row.inner_text())
        page.get_by_role("form", name="Scale").get_by_label("Minimum workers").fill("2")
        page.get_by_role("form", name="Scale").get_by_label("Maximum workers").fill("2")
        page.get_by_role("button", name="Scale").click()
        page.get_by_role("status").get_by_text("guest:2 is scaled.").wait_for()
        page.get_by_role("rowheader", name="2", exact=True).wait_for()
        page.get_by_role("button", name="Unregister").click()
        page.get_by_role("dialog").get_by_role("button", name="Unregister").click()
        page.get_by_role("status").get_by_text("guest:2 is unregistered.").wait_for()
        page.get_by_role("caption").get_by_text("1 model", exact=True).wait_for()
    assert server.http.get("/models/guest").status_code == 404


def test_adapters_come_and_go(browser: Browser, server: Server, tmp_path: Path) -> None:
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'model/model'")
        form = page.get_by_role("form", name="Register an adapter")
        form.get_by_label("Name").fill("french")
        form.get_by_label("Source").fill(str(tmp_path / "absent"))
        form.get_by_role("button").click()
        page.get_by_role("alert").wait_for()  # what the management API says
        form.get_by_label("Source").fill(str(tmp_path))
        form.get_by_role("button").click()
        page.get_by_role("button", name="Unregister french").click()
        page.get_by_text("None is registered.").wait_for()
    assert server.http.get("/models/model/adapters").json()["adapters"] == []


def test_a_thousand_models_are_found_and_shown(browser: Browser, server: Server) -> None:
    """The events are made here; a thousand workers would be another test."""
    rows = [
        {"label": f"m{number:04}", "name": f"m{number:04}", "version": None, "status": "Healthy", "reason": "",
         "handler": "echo", "workers": {"ready": 1}, "queue": 0, "running": 0, "adapters": 0, "kv": None}
        for number in range(1000)
    ]  # fmt: skip
    with opened(browser, server) as page:
        tell(page, {**MESSAGE, "models": rows})
        page.get_by_text("1,000 models, page 1 of 20").wait_for()
        assert page.get_by_role("row").count() == 51
        page.get_by_role("button", name="Next").click()
        page.get_by_role("link", name="m0050").wait_for()
        assert page.get_by_role("link", name="m0050").evaluate("link => link.getBoundingClientRect().top >= 0")
        page.get_by_role("searchbox", name="Find").fill("0777")
        page.get_by_role("link", name="m0777").click()
        page.get_by_role("link", name="All models").click()
        page.get_by_role("link", name="m0777").wait_for()
        assert page.get_by_role("row").count() == 2


def test_a_failure_is_read_on_a_narrow_screen(browser: Browser, server: Server) -> None:
    row = {"label": "m", "name": "m", "version": None, "status": "FAILED", "reason": "there is no directory /models/m",
           "handler": "", "loading": None, "reloading": False}  # fmt: skip
    with opened(browser, server, viewport=NARROW) as page:
        tell(page, {**MESSAGE, "models": [row]})
        page.locator(".reason").wait_for()
        assert page.locator(".reason").evaluate("reason => reason.scrollHeight <= reason.clientHeight")


def test_keys_are_found_in_any_case_and_stand_in_one_line(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        page.evaluate("location.hash = 'model/model'")
        page.get_by_role("checkbox", name="Defaults, too").check()
        page.get_by_label("Find a key").fill("MAX_ROLLING")
        key = page.get_by_role("rowheader", name="option.max_rolling_batch_size", exact=True).locator("code")
        assert key.evaluate("code => code.getClientRects().length") == 1
        page.get_by_label("Find a key").fill("")
        for width in (1280, 1030, 900, 700):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_asks_for_the_key_and_shows_nothing_without(browser: Browser, tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model"), variables={"SERVING_MANAGEMENT_API_KEYS": ADMIN}, workers=1) as server:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.get_by_role("alert").get_by_text("No API key was sent").wait_for()
        assert page.get_by_role("link", name="model", exact=True).count() == 0
        page.get_by_label("One of management_api_keys").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("alert").get_by_text("not one of this server").wait_for()
        page.get_by_label("One of management_api_keys").fill(ADMIN)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("link", name="model", exact=True).wait_for()
        page.close()


def test_a_real_model_answers_with_probabilities(
    browser: Browser, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("demo")
    with serving(
        directory, demo_model_dir, dtype="fp32", max_rolling_batch_size="4", libraries="transformers"
    ) as product:
        page = browser.new_page()
        page.goto(f"{product.url}/console#chat")
        page.get_by_text("Parameters").click()
        page.get_by_role("textbox", name="Temperature").fill("0")
        page.get_by_role("checkbox", name="Probabilities").check()
        ask(page, "What is the capital of France?")
        page.get_by_text("ended by stop").wait_for()
        answer = page.locator(".assistant")
        assert "The capital of France is Paris." in answer.inner_text()
        assert answer.locator(".token").first.get_attribute("title").split(" %")[0]
        assert re.search(r"8 tokens · [\d.]+ tokens/s", answer.locator(".timings").inner_text())
        answer.get_by_text("Tokens", exact=True).click()
        assert answer.get_by_role("row", name=re.compile("Paris")).get_by_role("cell").nth(2).inner_text().endswith("%")
        check_memory(page, product)
        page.close()


def check_memory(page: Page, product: Product) -> None:
    """The page of the model has the estimate of its weights, and KV cache is in use."""
    page.evaluate(f"location.hash = 'model/{product.model}'")
    weights = page.locator("div", has=page.get_by_text("Weights, estimated", exact=True)).last
    assert re.search(r"0\.\d+ GiB", weights.inner_text())

"""The records of a worker: none of a request's text begins a line of its log, or is a metric there."""

from __future__ import annotations

import logging
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from own_code_helpers import make_own
from server_helpers import Server, make_model, running

from handlers.user_code import format_user_error
from lmi_server.worker.log import RecordFormatter

FORGED = "x\n[METRICS]Forged.Count:1|#a:b|c\nERROR forged: line\r[METRICS]Forged.Count:1|c\x1b[2J\u202e"
CODE = """
import logging
import threading
import warnings
from djl_python import Output

def fail(text):
    raise ValueError(text)

class Deleted:
    def __init__(self, text):
        self.text = text

    def __del__(self):
        fail(self.text)

def handle(inputs):
    if inputs.is_empty():
        return None
    asked = inputs.get_as_json()
    if asked.get("by") == "warning":
        warnings.warn(asked["text"])
        return Output().add("done")
    if asked.get("by") in ("thread", "deletion"):
        run = threading.Thread(target=fail, args=[asked["text"]]) if asked["by"] == "thread" else Deleted(asked["text"])
        if asked["by"] == "thread":
            run.start()
            run.join()
        return Output().add("done")
    if asked.get("measure"):
        logging.getLogger("own").info("[METRICS]Own.Count:%d|#User:%s|c", 2, asked["text"])
        return Output().add("done")
    logging.getLogger("own").warning("got %s", asked["text"])
    raise ValueError(asked["text"])
"""


def formatted(message: str, *arguments: object, error: BaseException | None = None) -> str:
    details = None if error is None else (type(error), error, None)
    return RecordFormatter().format(logging.LogRecord("own", logging.ERROR, "", 0, message, arguments, details))


def test_further_lines_of_a_record_are_indented_and_control_characters_escaped() -> None:
    text = formatted("request: %s", FORGED, error=ValueError(FORGED))
    first, *others = text.split("\n")
    assert first == "ERROR own: request: x"
    assert others
    assert all(line.startswith("  ") for line in others)
    assert text.replace("\n", "").isprintable()


def test_a_long_record_is_cut() -> None:
    assert len(formatted("%s", "a b" * 1_000_000)) < 200_000


def test_a_long_message_leaves_room_for_the_lines_of_the_code() -> None:
    try:
        raise ValueError("a b" * 1_000_000)
    except ValueError as error:
        text = RecordFormatter().format(
            logging.LogRecord("own", logging.ERROR, "", 0, "request", None, (type(error), error, error.__traceback__))
        )
    first, *lines = text.split("\n")
    assert first == "ERROR own: request"
    assert lines[0] == "  Traceback (most recent call last):"
    assert 'raise ValueError("a b" * 1_000_000)' in text
    assert lines[-1].startswith("  ValueError: a b")
    assert lines[-1].endswith("... (3000013 characters)")
    assert len(text) < 10_000


@pytest.mark.parametrize("place", [("model.py", 1, 1, ""), ("m" * 1_000_000, 1, 1, ""), None])
def test_a_long_error_of_syntax_is_cut_in_what_a_request_or_a_load_reports(place: object) -> None:
    error = SyntaxError("a b" * 1_000_000, *([] if place is None else [place]))
    assert len(format_user_error(error, "/model")) < 10_000


def chained(kind: str, count: int) -> BaseException:
    """Return an exception with so many before it, each set as `kind` of the next one."""
    error: BaseException = ValueError("of 0")
    for number in range(1, count):
        following = ValueError(f"of {number}")
        setattr(following, kind, error)
        error = following
    return error


def test_causes_and_contexts_are_shown_before_what_they_led_to() -> None:
    between = {
        "__cause__": "The above exception was the direct cause of the following exception:",
        "__context__": "During handling of the above exception, another exception occurred:",
    }
    for kind, text in between.items():
        lines = formatted("m", error=chained(kind, 2)).replace("\n  ", "\n").split("\n")
        assert lines == ["ERROR own: m", "ValueError: of 0", "", text, "", "ValueError: of 1"]
    hidden = chained("__context__", 2)
    hidden.__suppress_context__ = True
    assert formatted("m", error=hidden) == "ERROR own: m\n  ValueError: of 1"


def test_an_exception_in_a_circle_is_shown_once() -> None:
    error = chained("__cause__", 2)
    assert error.__cause__ is not None
    error.__cause__.__cause__ = error
    assert formatted("m", error=error).count("ValueError: of") == 2


@pytest.mark.parametrize("kind", ["__cause__", "__context__"])
def test_a_chain_of_any_length_is_cut(kind: str) -> None:
    text = formatted("m", error=chained(kind, 20_000))
    assert "... more exceptions than 50 ..." in text
    assert text.endswith("ValueError: of 19999")
    assert len(text) < 20_000


def test_the_calls_of_a_deep_recursion_are_cut_in_the_middle() -> None:
    def deeper(depth: int) -> None:
        if depth == 0:
            raise ValueError("deep")
        deeper(depth - 1)

    with pytest.raises(ValueError, match="deep") as found:
        deeper(500)
    details = (ValueError, found.value, found.value.__traceback__)
    text = RecordFormatter().format(logging.LogRecord("own", logging.ERROR, "", 0, "m", None, details))
    assert re.search(r"\.\.\. 40\d more calls \.\.\.", text)
    assert text.endswith('raise ValueError("deep")\n  ValueError: deep')


@pytest.mark.parametrize("end", [1, 2**31 - 1, 10**30, "x"])
def test_an_error_of_syntax_shows_its_place_whatever_its_offsets_are(end: Any) -> None:
    text = formatted("m", error=SyntaxError("no", ("model.py", 3, 1, "  x y\n", 3, end)))
    assert text == 'ERROR own: m\n    File "model.py", line 3\n      x y\n  SyntaxError: no'


def test_the_place_of_an_error_of_syntax_is_marked() -> None:
    text = formatted("m", error=SyntaxError("no", ("model.py", 3, 5, "  x y\n", 3, 6)))
    assert text == 'ERROR own: m\n    File "model.py", line 3\n      x y\n        ^\n  SyntaxError: no'


def test_an_error_of_syntax_of_any_attributes_is_reported() -> None:
    class Mute:
        def __str__(self) -> str:
            raise ValueError

    error = SyntaxError(Mute(), (Mute(), 10**5000, 1, Mute(), 1, 1))
    assert formatted("m", error=error) == "ERROR own: m\n  SyntaxError"
    assert format_user_error(error, "/model").startswith("SyntaxError")


def test_notes_are_shown_up_to_a_bound() -> None:
    error = ValueError("x")
    error.add_note("see the manual")
    assert formatted("m", error=error).endswith("ValueError: x\n  see the manual")
    error.__notes__ = ["a" * 100_000] * 100_000
    text = formatted("m", error=error)
    assert "... 99970 more notes ..." in text or len(text) > 128 * 1024
    assert len(text) < 140_000
    error.__notes__ = 5  # type: ignore[assignment]
    assert formatted("m", error=error).endswith("ValueError: x")


def test_a_group_shows_its_members_up_to_a_bound() -> None:
    group: BaseException = ExceptionGroup("several", [ValueError("a"), KeyError("b")])
    text = formatted("m", error=group)
    assert "  ExceptionGroup: several (2 sub-exceptions)\n" in text
    assert "    | ValueError: a\n" in text
    assert "    | KeyError: 'b'" in text
    for _ in range(500):
        group = ExceptionGroup("g", [group] * 20)  # type: ignore[list-item]
    assert len(formatted("m", error=group)) < 140_000


def test_the_message_of_a_member_is_cut_before_its_lines_are_marked() -> None:
    lines = 500_000
    group = ExceptionGroup("g", [ValueError("\n" * lines)])
    tracemalloc.start()
    try:
        assert len(formatted("m", error=group)) < 140_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * lines, "the message itself and few copies, but nothing for each of its lines"


def test_causes_that_a_property_makes_are_not_followed() -> None:
    class EndlessError(Exception):
        @property
        def __cause__(self) -> BaseException:  # type: ignore[override]
            return EndlessError()

    assert formatted("m", error=EndlessError()).endswith("EndlessError")


@pytest.mark.parametrize("raised", [ValueError, SystemExit])
def test_an_exception_that_cannot_be_shown_is_named(raised: type[BaseException]) -> None:
    class BrokenError(Exception):
        @property
        def __traceback__(self) -> None:  # type: ignore[override]
            raise raised

    text = formatted("m", error=BrokenError(FORGED))
    assert text.endswith(": its traceback cannot be shown")
    assert "BrokenError" in text


@pytest.mark.parametrize("message", ["[METRICS]a.Count:1", "%s"])
def test_only_a_mark_in_front_of_the_format_begins_a_line(message: str) -> None:
    text = formatted(message, *(["[METRICS]a.Count:1"] if "%" in message else []))
    assert text.startswith("[METRICS]") == (message != "%s")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    make_model(store / "echo", "handlers.echo.handler:EchoHandler")
    make_own(store / "own", CODE, maxWorkers=1)
    with running("--model-store", store, workers=2) as server:
        yield server


def forged(server: Server) -> list[str]:
    metrics = server.http.get("/metrics").text.split("\n")
    lines = [
        line for line in server.lines if re.match(r"(\S+ \S+ \w+ \S+ )?(\[own-\d+\] |\[echo-\d+\] )?ERROR forged", line)
    ]
    return [*lines, *(line for line in metrics if "Forged" in line)]


def test_a_field_of_a_request_writes_no_line_and_no_metric(server: Server) -> None:
    body = {"inputs": "a", FORGED: 1, "parameters": {FORGED: 1, "max_new_tokens": 1}}
    assert server.http.post("/predictions/echo", json=body).status_code == 200
    server.log_line(r"request \S+: .*is not known and is ignored")
    assert not forged(server)


def test_what_code_logs_or_raises_with_a_request_writes_no_line_and_no_metric(server: Server) -> None:
    answer = server.http.post("/predictions/own", json={"text": FORGED})
    assert answer.status_code >= 400
    server.log_line(r"WARNING own: got x$")
    server.log_line(r"ValueError: x$")
    assert not forged(server)


@pytest.mark.parametrize(
    ("by", "line"),
    [
        ("warning", r"WARNING py.warnings: .*UserWarning: x$"),
        ("thread", r"ERROR lmi_server.worker.log: the thread Thread-\d+.* ended"),
        ("deletion", r"ERROR lmi_server.worker.log: .*Deleted.__del__"),
    ],
)
def test_what_python_prints_by_itself_writes_no_line_and_no_metric(server: Server, by: str, line: str) -> None:
    answer = server.http.post("/predictions/own", json={"text": FORGED, "by": by})
    assert answer.status_code == 200
    server.log_line(line)
    assert not forged(server)


def test_code_may_log_a_metric(server: Server) -> None:
    answer = server.http.post("/predictions/own", json={"text": "u", "measure": True})
    assert answer.status_code == 200
    server.log_line(r"own")
    assert 'Own_total{User="u"} 2.0' in server.http.get("/metrics").text

"""What a comparison waits for, in lines on the standard error, and when it waits no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import for_terminal
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.verify.asking import Answer, Side

_LINE_EVERY_S = 5.0
_MAX_UNANSWERED = 3


class Waiting:
    """Says what the command does; `do` is for each new thing that it does."""

    def __init__(self) -> None:
        self._now = ("starting", time.monotonic())

    def do(self, what: str) -> None:
        """Say what the command waits for from now on."""
        self._now = (what, time.monotonic())

    @property
    def line(self) -> str:
        """Return what the command waits for, and since when."""
        what, began = self._now
        return for_terminal(SECRETS.mask(f"{what}, for {time.monotonic() - began:.0f} s"))


@contextmanager
def lines_while_waiting(every_s: float = _LINE_EVERY_S) -> Iterator[Waiting]:
    """Print what the command waits for every few seconds, so that the output has the report alone."""
    waiting, ended = Waiting(), threading.Event()

    def print_lines() -> None:
        while not ended.wait(every_s):
            typer.echo(waiting.line, err=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield waiting
    finally:
        ended.set()
        thread.join()


class Unanswered:
    """Ends a comparison with a server that does not answer: each further prompt would take the whole timeout."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._in_a_row: dict[str, int] = {}

    def count(self, side: Side, answer: Answer, most: int = _MAX_UNANSWERED) -> None:
        """Raise ConfigurationError if the side has left `most` prompts in a row without any answer."""
        found = self._in_a_row.get(side.title, 0) + 1 if answer.is_missing else 0
        self._in_a_row[side.title] = found
        if found < most:
            return
        times = "" if found == 1 else f", {found} times in a row"
        raise ConfigurationError(
            f"{side.title}: {answer.error}{times}; it has --timeout={self._timeout_s:g} seconds for each answer"
        )

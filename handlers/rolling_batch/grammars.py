"""The grammars of requests, whose masks a thread of its own computes while the model computes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from handlers.rolling_batch.sampling.state import TokenMask


class Grammar(TokenMask, Protocol):
    """What the output of one request must match (`handlers.structured_output.token_grammars.GrammarMatch`)."""

    is_stale: bool

    def fill(self) -> None:
        """Compute the mask for the next token; runs in another thread while the model computes."""
        ...

    def accept(self, token: int) -> None:
        """Go on by a token. Raises RequestError if the grammar does not allow it."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end of the sequence."""
        ...


class GrammarMasks:
    """The grammars of the requests that have one, by the requests' numbers."""

    def __init__(self) -> None:
        self._grammars: dict[int, Grammar] = {}
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._failures: Future[dict[int, BaseException]] | None = None

    def add(self, number: int, grammar: Grammar) -> None:
        self._grammars[number] = grammar

    def remove(self, number: int) -> None:
        """Forget a grammar; unknown numbers are ignored."""
        self._grammars.pop(number, None)

    def begin(self) -> None:
        """Begin to compute which tokens the grammars allow next."""
        stale = {number: grammar for number, grammar in self._grammars.items() if grammar.is_stale}
        self._failures = self._thread.submit(_fill, stale) if self._grammars else None

    def finish(self) -> Mapping[int, BaseException]:
        """Wait until the masks are computed; return the errors of failed grammars."""
        return {} if self._failures is None else self._failures.result()

    def stop(self) -> None:
        self._thread.shutdown()


def _fill(grammars: Mapping[int, Grammar]) -> dict[int, BaseException]:
    failed: dict[int, BaseException] = {}
    for number, grammar in grammars.items():
        try:
            grammar.fill()
        # The border to the library of grammars, in Rust: it may raise anything, and its panics are no Exceptions.
        except BaseException as error:  # noqa: BLE001
            failed[number] = error
    return failed

"""Compiles the constraints of requests to grammars, off the event loop and off the engine's thread, and keeps them."""

from __future__ import annotations

import asyncio
import queue
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import msgspec

from handlers.structured_output import limits
from handlers.structured_output.check_process import CHECK_BYTES, CHECK_SECONDS, CheckProcess
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import StructuredOutputs

_MAX_GRAMMARS = 32  # of up to 40 MiB each
_THREADS = 2  # one grammar that takes long does not hold up the next one
_SHOWN_PROBLEM = 300  # characters of what the library says
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_EXCERPT = re.compile(r"\n *\d+ \|")

T = TypeVar("T")


class GrammarCache(Generic[T]):
    """Makes a value of the grammar of each constraint with `make`, in a thread, and keeps the last ones used.

    Requests for the same constraint wait for the same making. All methods but `stop` run on the event loop.
    """

    def __init__(
        self, make: Callable[[str], T], engine_judges: Collection[str] = (), max_white_space: int | None = None
    ) -> None:
        """`engine_judges`: kinds of constraint whose keywords another library knows; only the bounds hold for them.

        `max_white_space` characters may stand together in JSON, where the constraint itself does not say.
        """
        self._make = make
        self._white_space = None if max_white_space is None else rf"[ \n\r\t]{{0,{max_white_space}}}"
        self._engine_judges = engine_judges
        self._made: OrderedDict[bytes, asyncio.Task[T]] = OrderedDict()
        self._executor = ThreadPoolExecutor(_THREADS, "grammars")
        self._checkers: queue.SimpleQueue[CheckProcess] = queue.SimpleQueue()
        for _ in range(_THREADS):
            self._checkers.put(CheckProcess())

    async def get(self, constraint: StructuredOutputs) -> T:
        """Return what `make` makes of a constraint's grammar. Raises RequestError if it cannot be compiled."""
        if constraint.whitespace_pattern is None:
            constraint = msgspec.structs.replace(constraint, whitespace_pattern=self._white_space)
        key = msgspec.json.encode(constraint)
        task = self._made.get(key)
        if task is None:
            task = self._made[key] = asyncio.create_task(self._run(constraint))
            task.add_done_callback(lambda done: self._on_end(key, done))
        self._made.move_to_end(key)
        return await asyncio.shield(task)  # a client that leaves ends neither the making nor the others' wait

    async def _run(self, constraint: StructuredOutputs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._compile, constraint)

    def _on_end(self, key: bytes, task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._made.pop(key, None)
        while len(self._made) > _MAX_GRAMMARS and next(iter(self._made.values())).done():
            self._made.popitem(last=False)

    def _compile(self, constraint: StructuredOutputs) -> T:
        # Imported here, so that a model whose requests have no constraints does not need the library.
        try:
            from handlers.structured_output.grammar_text import grammar_text
        except ModuleNotFoundError as error:
            raise RequestError(
                f"{limits.LABELS[constraint.kind]} needs the package {error.name}, which this server lacks; install it"
                " there, or leave the constraint out"
            ) from error
        text = grammar_text(constraint)
        checker = self._checkers.get()
        try:
            problem = checker.check(text)
        except EOFError:
            raise RequestError(
                f"{limits.LABELS[constraint.kind]} takes more than {CHECK_SECONDS} s or {CHECK_BYTES >> 30} GiB to"
                " compile; make it simpler: smaller bounds, fewer alternatives, patterns with fewer repetitions"
            ) from None
        finally:
            self._checkers.put(checker)
        if problem is not None and constraint.kind not in self._engine_judges:
            raise refusal(constraint.kind, problem)
        return self._make(text)

    def stop(self) -> None:
        """End the processes and the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        while not self._checkers.empty():
            self._checkers.get().stop()


def refusal(kind: str, problem: str) -> RequestError:
    """Return the error for a constraint that the library cannot compile; its message repeats the grammar, this not."""
    said = " ".join(_PLACE.sub("", _EXCERPT.split(problem)[0]).split())[:_SHOWN_PROBLEM]
    return RequestError(f"{limits.LABELS[kind]} cannot be compiled: {said}; correct it, or leave out what that names")

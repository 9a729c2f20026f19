"""The input of a batch, read in blocks: no more than a line and a block of it is in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from frontend.batches.records import LineFault
from frontend.storage.objects import ObjectStore
from lmi_server.batches.lines import BatchLine, LineError, duplicate_id, parse_line, split_lines

_BLOCK = 1 << 20
_TAKEN = 64  # lines at a time
_TAKEN_SIZE = 1 << 20
_BREATH = 100  # lines, after which the event loop has its turn: it shares the interpreter with this thread
_BREATH_S = 0.0002
_MAX_FAULTS = 100


class BatchInput:
    """The lines of one file. Every method may block; raises OSError.

    `longest` is how many bytes a line may have, `endpoint` the url of all.
    """

    def __init__(self, store: ObjectStore, key: str, longest: int, endpoint: str) -> None:
        self._store = store
        self._key = key
        self._longest = longest
        self._endpoint = endpoint

    def _blocks(self) -> Iterator[bytes]:
        offset = 0
        while block := self._store.read(self._key, offset, _BLOCK):
            yield block
            offset += len(block)

    def _number_lines(self) -> Iterator[tuple[int, bytes | None]]:
        for number, data in enumerate(split_lines(self._blocks(), self._longest), start=1):
            if number % _BREATH == 0:
                time.sleep(_BREATH_S)
            yield number, data

    def lines(self) -> Iterator[BatchLine]:
        """Yield the requests. Raises LineError if `check` would find a fault, as if another server has found none."""
        for number, data in self._number_lines():
            line = parse_line(number, data, self._longest, self._endpoint)
            if line is not None:
                yield line

    def check(self, max_lines: int) -> tuple[int, int, list[LineFault]]:
        """Return the number of lines and of requests, and what is wrong; at most `max_lines` lines are allowed."""
        seen: set[int] = set()
        faults: list[LineFault] = []
        number = 0
        for number, data in self._number_lines():
            if number > max_lines:
                message = f"the file has more than batches_max_requests={max_lines} lines"
                return number, 0, [LineFault("too_many_requests", message)]
            try:
                line = parse_line(number, data, self._longest, self._endpoint)
                if line is not None:
                    _note(seen, line)
            except LineError as error:
                faults.append(LineFault(error.code, error.message, error.param, number))
                if len(faults) >= _MAX_FAULTS:
                    break
        if not seen and not faults:
            faults.append(LineFault("empty_file", "the file has no requests"))
        return number, len(seen), faults


def _note(seen: set[int], line: BatchLine) -> None:
    """Note the line's custom_id, as a hash with a secret of this process. Raises LineError."""
    digest = hash(line.custom_id)
    if digest in seen:
        raise duplicate_id(line.custom_id)
    seen.add(digest)


def take(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """Return the next lines, some at a time; none at the end."""
    taken: list[BatchLine] = []
    size = 0
    for line in islice(lines, _TAKEN):
        taken.append(line)
        size += len(line.body)
        if size >= _TAKEN_SIZE:
            break
    return taken

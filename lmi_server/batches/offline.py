"""Answers the lines of a file with a model that is loaded for it.

Answers are appended to OUT.partial, which becomes OUT at the end. A call that finds one goes on with the lines whose
custom_id is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.batches.lines import (
    ROUTES,
    BatchLine,
    LineError,
    answer_line,
    duplicate_id,
    error_line,
    is_answered,
    parse_line,
    split_lines,
)
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ConfigurationError, LmiServerError, QueueFullError, error_from_kind
from lmi_server.contract.protocol import End, Error, Input, Reply
from lmi_server.dialects.errors import error_reply
from lmi_server.files.journal import FileJournal, TakenError, remove_journal
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry

_LONGEST = 64 << 20  # bytes of a line
_BLOCK = 1 << 20
_PAUSE_S = 0.05  # until a full queue is asked again
_TRIES = 3  # if a worker dies or gets stuck over a request
_AGAIN = frozenset({"WorkerDiedError", "PredictTimeoutError"})


class _Answered(msgspec.Struct):
    """What is read of an answer from before."""

    custom_id: str
    error: msgspec.Raw = msgspec.Raw(b"null")
    response: dict[str, msgspec.Raw] | None = None

    @property
    def is_error(self) -> bool:
        status = bytes((self.response or {}).get("status_code", b"500"))
        return not (status.isdigit() and is_answered(int(status)))


@dataclass
class LineCounts:
    """How the requests have ended."""

    answered: int = 0
    failed: int = 0

    def add(self, is_error: bool) -> None:
        self.failed += is_error
        self.answered += not is_error


class OfflineBatch:
    """Answers the requests of one file, `concurrency` at a time."""

    def __init__(self, requests: Path, output: Path, concurrency: int) -> None:
        self._requests = requests
        self._output = output
        self._partial = output.with_name(f"{output.name}.partial")
        self._slots = asyncio.Semaphore(concurrency)
        self._written: list[bytes] = []
        self._counts = LineCounts()

    async def run(self, model: str, environment: Mapping[str, str]) -> LineCounts:
        """Answer every request with `model`; return how they have ended. Raises ConfigurationError and OSError."""
        self._check()
        try:
            journal = FileJournal(self._partial)
        except TakenError:
            raise ConfigurationError(f"{self._partial} is written by another process; wait for it") from None
        try:
            done = self._read_answered(journal)
            await self._answer_with(model, environment, done, journal)
        except ExceptionGroup as group:  # of the tasks, and of the loop that makes them
            raise group.exceptions[0] from None
        finally:
            journal.close()
        self._partial.replace(self._output)
        remove_journal(self._partial)
        return self._counts

    def _lines(self) -> Iterator[BatchLine]:
        with self._requests.open("rb") as file:
            blocks = iter(lambda: file.read(_BLOCK), b"")
            for number, data in enumerate(split_lines(blocks, _LONGEST), start=1):
                try:
                    line = parse_line(number, data, _LONGEST)
                except LineError as error:
                    raise ConfigurationError(f"{self._requests}:{number}: {error.message}") from None
                if line is not None:
                    yield line

    def _check(self) -> None:
        """Raise ConfigurationError for a file with a line that is no request, before anything loads."""
        if any(path.exists() and path.samefile(self._requests) for path in (self._output, self._partial)):
            raise ConfigurationError(f"{self._output} is the file of the requests; name another file for the answers")
        seen: set[int] = set()
        for line in self._lines():
            if hash(line.custom_id) in seen:
                error = duplicate_id(line.custom_id)
                raise ConfigurationError(f"{self._requests}:{line.number}: {error.message}")
            seen.add(hash(line.custom_id))

    def _read_answered(self, journal: FileJournal) -> set[str]:
        done: set[str] = set()
        for data in split_lines(journal.blocks(), 1 << 62):
            try:
                answer = msgspec.json.decode(data or b"", type=_Answered)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"{self._partial} has no answers ({error}); remove it") from None
            done.add(answer.custom_id)
            self._counts.add(answer.is_error)
        return done

    async def _answer_with(
        self, name: str, environment: Mapping[str, str], done: set[str], journal: FileJournal
    ) -> None:
        artifacts = artifact_settings(None, environment)
        models = ModelRegistry(environment, artifacts, inspect_model, drain_timeout_s=0.0, log_level="WARNING")
        try:
            model = await models.register_and_load(ModelSource(name, "model"))
            async with asyncio.TaskGroup() as group:
                for line in self._lines():
                    if line.custom_id not in done:
                        await self._slots.acquire()
                        group.create_task(self._answer(line, model))
                        await self._write(journal)
            await self._write(journal)
        finally:
            await models.stop()

    async def _answer(self, line: BatchLine, model: Model) -> None:
        line_id = f"batch_req_{line.number}"
        try:
            status, data = await _ask(line, line_id, model)
            text = answer_line(line_id, line.custom_id, status, line_id, data)
            self._counts.add(not is_answered(status))
        except LmiServerError as error:
            text = error_line(line_id, line.custom_id, error.kind, error.message)
            self._counts.add(is_error=True)
        self._written.append(text + b"\n")
        self._slots.release()

    async def _write(self, journal: FileJournal) -> None:
        if self._written:
            written, self._written = self._written, []
            await asyncio.to_thread(journal.append, b"".join(written))


async def _ask(line: BatchLine, line_id: str, model: Model) -> tuple[int, bytes]:
    """Return status and body of an answer. Raises LmiServerError if the model cannot be asked."""
    route = ROUTES[line.url]
    request = Input(route, {"content-type": "application/json"}, [("data", line.body)], line_id)
    tries = 0
    while True:
        try:
            reply = model.loaded().submit(request, on_overflow=lambda: None).reply
        except QueueFullError:
            await asyncio.sleep(_PAUSE_S)
            continue
        parts = []
        while reply.terminal is None:
            await reply.wait()
            parts.append(reply.take())
        parts.append(reply.take())
        tries += 1
        match reply.terminal:
            case Error(_, kind) if kind in _AGAIN and tries < _TRIES:
                continue
            case Error(_, kind, message):
                status, _, data = error_reply(route, error_from_kind(kind, message))
                return status, data
            case Reply(_, status, _, data):
                return status, data
            case End(_, status):
                return status, b"".join(parts)

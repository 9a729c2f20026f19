"""Responses that are made without a waiting client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.detached.request import DetachedRequest, KeptAnswer, process_name
from frontend.http.clients import Inference, Receive, Scope, Target
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.storage.objects import StoreThreads
from frontend.stored_responses.records import ResponseStore, StoredResponse
from lmi_server.contract.errors import KeyBusyError

logger = logging.getLogger(__name__)

_MEMORY = 256 << 20  # bytes of answers until they are stored
_FULL = f"the answers of responses in the background take {_MEMORY} bytes; wait for some of them"
CANCELLED = "cancelled"


@dataclass
class _Running:
    """A response of this server. `ending` is held while its end, or its cancellation, is stored."""

    owner: str
    request: DetachedRequest
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)


class BackgroundResponses:
    """Runs responses of this server, at most `capacity` of each owner at a time."""

    def __init__(self, infer: Inference, store: ResponseStore, threads: StoreThreads, capacity: int) -> None:
        self.process = process_name()
        self._infer = infer
        self._store = store
        self._threads = threads
        self._capacity = capacity
        self._memory = MemoryBudget(_MEMORY, _FULL)
        self._running: dict[str, _Running] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}

    async def start(
        self, owner: str, record: StoredResponse, target: Target, scope: Scope, receive: Receive
    ) -> KeptAnswer | None:
        """Begin a response, and store that it is in progress; return the refusal instead if no queue takes it.

        Raises KeyBusyError if the owner has too many, ServingError if the store fails.
        """
        if sum(running.owner == owner for running in self._running.values()) >= self._capacity:
            raise KeyBusyError(
                f"this API key has responses_max_background={self._capacity} responses in the background; wait for one"
            )
        request = DetachedRequest(KeptAnswer(), HeldBytes(self._memory))
        self._running[record.id] = _Running(owner, request)
        stored = asyncio.Event()
        task = asyncio.create_task(self._run(owner, record, request, target, scope, receive, stored))
        self._tasks[task] = record.id
        task.add_done_callback(self._tasks.pop)
        accepted = asyncio.create_task(request.accepted.wait())
        try:
            await asyncio.wait({accepted, task}, return_when=asyncio.FIRST_COMPLETED)
            if not request.accepted.is_set():
                return request.record
            await self._threads.serve(self._store.save, owner, record)
        except BaseException:
            self.cancel(record.id)
            raise
        finally:
            accepted.cancel()
            stored.set()
        return None

    def ending(self, response_id: str) -> AbstractAsyncContextManager[None]:
        """Return a block in which this server stores no end of a response: so none is written over another."""
        running = self._running.get(response_id)
        return contextlib.nullcontext() if running is None else running.ending

    def cancel(self, response_id: str) -> bool:
        """End a response of this server; return whether it runs here."""
        running = self._running.get(response_id)
        if running is not None and running.request.cancel is not None:
            running.request.cancel()
        return running is not None

    async def finish(self) -> None:
        """Wait until all have ended and are stored."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def give_up(self) -> None:
        for response_id in self._tasks.values():
            logger.error("response %s is lost: the server ends before it is stored", response_id)

    async def _run(
        self,
        owner: str,
        record: StoredResponse,
        request: DetachedRequest,
        target: Target,
        scope: Scope,
        receive: Receive,
        stored: asyncio.Event,
    ) -> None:
        try:
            await request.run(self._infer, target, scope, receive)
            if request.accepted.is_set():
                await stored.wait()  # the end must not be overwritten by the beginning
                _complete(record, request.record)
                async with self.ending(record.id):
                    await self._threads.run(self._save_end, owner, record)
        except OSError as error:
            logger.error("response %s is lost: %s", record.id, error)
        finally:
            request.answer.release()
            del self._running[record.id]

    def _save_end(self, owner: str, record: StoredResponse) -> None:
        """Store the end, unless the response was deleted or cancelled in the meantime."""
        before = self._store.load(owner, record.id)
        if before is not None and before.is_running:
            self._store.save(owner, record)


def in_progress(response_id: str, model: str | None, previous: str | None) -> dict[str, Any]:
    """Return the object of a response that has just begun in the background."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": True,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model or "",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": previous,
        "store": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def end_early(response: dict[str, Any], status: str, code: str = "", message: str = "") -> None:
    """Note that a response has ended without an answer."""
    response["status"] = status
    response["error"] = {"code": code, "message": message} if code else None


def _complete(record: StoredResponse, answer: KeptAnswer) -> None:
    """Put the answer into the record, or what the answer says went wrong."""
    own = {name: record.response[name] for name in ("id", "created_at", "previous_response_id", "background", "store")}
    body = b"".join(answer.items)
    try:
        value = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = {}
    if answer.status == 0:
        end_early(record.response, CANCELLED)
    elif answer.status == 200 and value.get("object") == "response":
        record.response = {**value, **own}
    else:
        error = value.get("error")
        message = error.get("message") if isinstance(error, dict) else body.decode(errors="replace")
        end_early(record.response, "failed", "server_error", str(message))

"""One run of a load: sends the requests when they are due, and collects their records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmi_server.bench.arrivals import Arrivals, ClosedLoop, within
from lmi_server.bench.client import LoadConnection, Target
from lmi_server.bench.records import Record
from lmi_server.bench.workload import Prompt

_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run is: a number of requests (or chats) or seconds, what ends first; a request has `timeout_s`."""

    requests: int | None
    duration_s: float | None
    timeout_s: float


@dataclass(slots=True)
class _PendingRequest:
    """The bytes of a request. The text of its answer is kept if the chat has another turn."""

    data: bytes
    has_next: bool
    answer: str = ""


class Run:
    """A run. `records` has the requests that have ended so far.

    The counts beside them are for a look at a run that goes on: figures of all records take time that it needs.
    """

    def __init__(self, target: Target, arrivals: Arrivals, prompts: Iterator[Prompt], length: RunLength) -> None:
        self.records: list[Record] = []
        self.running = self.completed = self.output_tokens = self.ended_chats = 0
        self.started = time.perf_counter()
        self._target = target
        self._arrivals = arrivals
        self._prompts = prompts
        self._length = length
        self._idle: list[LoadConnection] = []
        self._busy: dict[LoadConnection, Record] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._all_sent = False
        self._ended = asyncio.Event()

    async def run(self, seed: int, on_tick: Callable[[Run], None] = lambda run: None) -> list[Record]:
        """Run the load, and call `on_tick` twice a second. Returns the records in the order of their ends."""
        self.started = time.perf_counter()
        ticker = asyncio.create_task(self._tick(on_tick))
        try:
            if isinstance(self._arrivals, ClosedLoop):
                await self._run_closed_loop(self._arrivals.concurrency)
            else:
                await self._open(within(self._arrivals.offsets(seed), self._length.requests, self._length.duration_s))
            self._all_sent = True
            if self.running:
                await self._ended.wait()
        finally:
            ticker.cancel()
            for task in self._opening:
                task.cancel()
            for connection in [*self._idle, *self._busy]:
                connection.close()
        return self.records

    # --- when requests are sent ---

    async def _run_closed_loop(self, concurrency: int) -> None:
        """Keep `concurrency` requests running."""
        done = asyncio.Event()
        left = self._length.requests
        clients = concurrency if left is None else min(concurrency, left)
        sent = 0

        def next_request() -> None:
            nonlocal sent, clients
            now = time.perf_counter()
            if self._is_over() or (left is not None and sent >= left):
                clients -= 1
                if not clients:
                    done.set()
                return
            sent += 1
            self._request(now, next(self._prompts), next_request)

        for _ in range(clients):
            next_request()
        await done.wait()

    async def _open(self, offsets: Iterator[float]) -> None:
        """Send each request at its time, however many are running."""
        start = time.perf_counter()
        for offset in offsets:
            due = start + offset
            await asyncio.sleep(max(due - time.perf_counter(), 0))  # answers are read even if requests are late
            self._request(due, next(self._prompts), _nothing)

    def _is_over(self) -> bool:
        limit = self._length.duration_s
        return limit is not None and time.perf_counter() - self.started >= limit

    # --- one request ---

    def _request(self, due: float, prompt: Prompt, then: Callable[[], None]) -> None:
        """Send a request. Its next turn follows when it is answered; `then` is called when all turns have ended."""
        record = Record(due, adapter=prompt.adapter)
        request = _PendingRequest(self._target.request(prompt), has_next=bool(prompt.later))
        self.running += 1

        def on_end(record: Record) -> None:
            self.running -= 1
            self.records.append(record)
            if record.is_good:
                self.completed += 1
                self.output_tokens += record.output_tokens
            if record.is_good and prompt.later and not self._is_over():
                self._request(time.perf_counter(), prompt.with_answer(request.answer), then)
            else:
                self.ended_chats += 1
                then()
            if self._all_sent and not self.running:
                self._ended.set()

        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                self._send(connection, request, record, on_end)
                return
        self._connect(request, record, on_end)

    def _connect(self, request: _PendingRequest, record: Record, on_end: Callable[[Record], None]) -> None:
        task = asyncio.create_task(self._connect_and_send(request, record, on_end))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect_and_send(
        self, request: _PendingRequest, record: Record, on_end: Callable[[Record], None]
    ) -> None:
        target = self._target
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._length.timeout_s):
                _, connection = await loop.create_connection(
                    lambda: LoadConnection(target, self._idle.append, self._forget),
                    target.host,
                    target.port,
                    ssl=target.tls,
                )
        except OSError as error:  # TimeoutError, too
            record.sent = record.end = time.perf_counter()
            record.error = f"cannot connect: {error or 'timed out'}"
            await asyncio.sleep(_TICK_S)  # a server that is down would be asked without pause by a closed loop
            on_end(record)
            return
        self._send(connection, request, record, on_end)

    def _send(
        self, connection: LoadConnection, request: _PendingRequest, record: Record, on_end: Callable[[Record], None]
    ) -> None:
        def on_answer(record: Record) -> None:
            del self._busy[connection]
            if request.has_next and record.is_good:
                request.answer = connection.text()  # now: the connection is free for another request after this
            if connection.was_stale:
                self._connect(request, record, on_end)
                return
            # Not at once: the connection becomes free right after this, and the next request may use it.
            asyncio.get_running_loop().call_soon(on_end, record)

        self._busy[connection] = record
        connection.send(request.data, record, on_answer)

    def _forget(self, connection: LoadConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    async def _tick(self, on_tick: Callable[[Run], None]) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            late = time.perf_counter() - self._length.timeout_s
            for connection, record in list(self._busy.items()):
                if record.sent < late:
                    connection.abandon(f"no end within {self._length.timeout_s:g} s")
            on_tick(self)


def _nothing() -> None:
    """Send nothing after an answer: an open loop sends by the clock."""

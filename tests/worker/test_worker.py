"""The worker process alone: the test is the front end at the other end of the link."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_servers import fork_worker
from relay_helpers import FAULTS, HANDLERS, load_of, on_loop

from lmi_server.contract.link import WorkerLink, worker_link
from lmi_server.contract.protocol import (
    Cancel,
    Chunk,
    Control,
    End,
    Error,
    Failed,
    Frames,
    GetMetrics,
    Head,
    Input,
    Item,
    Ready,
    Reply,
    Shutdown,
    Stats,
    Submit,
)


class Worker:
    """A worker process and what it has sent so far."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.lost = asyncio.Event()
        self.link: WorkerLink = worker_link(self._received, self.lost.set)
        self.process: Process
        self._arrived = asyncio.Event()

    def _received(self, message: Any) -> None:
        self.messages.append(message)
        self._arrived.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self._arrived.clear()
            await self._arrived.wait()

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def items(self, number: int) -> list[Item]:
        return [item for frames in self.of(Frames) for item in frames.items if item.id == number]

    async def ended(self, number: int) -> list[Item]:
        await self.until(lambda: any(isinstance(item, Reply | End | Error) for item in self.items(number)))
        return self.items(number)

    def submit(self, number: int, prompt: str, stream: bool = True, tokens: int = 3) -> None:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}, "stream": stream}
        self.link.send(Submit(number, Input("invocations", {}, [("data", msgspec.json.encode(body))])))

    def complete(self, number: int, prompt: str | list[str]) -> None:
        body = msgspec.json.encode({"prompt": prompt, "max_tokens": 3})
        self.link.send(Submit(number, Input("completions", {}, [("data", body)])))


@asynccontextmanager
async def worker_of(
    directory: Path, handler: str = FAULTS, spawned: bool = False, **options: str
) -> AsyncIterator[Worker]:
    """Start a worker that is a fork, or `spawned` as a server does it."""
    worker = Worker()
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().create_unix_connection(lambda: worker.link, sock=ours)
    with theirs:
        command = (sys.executable, "-m", "lmi_server.worker", "--link", f"fd:{theirs.fileno()}")
        start = spawn_worker if spawned else fork_worker
        worker.process = await start(command, {"PYTHONPATH": HANDLERS}, (theirs.fileno(),))
    worker.link.send(load_of(directory, handler, options))
    try:
        await worker.until(lambda: worker.of(Ready) or worker.of(Failed))
        yield worker
    finally:
        worker.link.close()
        assert worker.process.stderr is not None
        await worker.process.stderr.read()
        await worker.process.wait()


async def spawn_worker(command: Sequence[str], variables: Mapping[str, str], inherited: Sequence[int]) -> Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=DEVNULL,
        stderr=PIPE,
        start_new_session=True,
        pass_fds=inherited,
        env=os.environ | variables,
    )


@on_loop
async def test_a_stream_is_head_chunks_end(tmp_path: Path) -> None:
    async with worker_of(tmp_path, spawned=True) as worker:
        worker.submit(1, "a b", tokens=1000)
        head, *chunks, end = await worker.ended(1)
        assert head == Head(1, 200, [("content-type", "application/jsonlines")])
        assert isinstance(end, End)
        assert (end.status, end.message) == (200, "")
        assert end.summary is not None
        assert (end.summary.finish_reason, end.summary.prompt_tokens, end.summary.output_tokens) == ("length", 2, 1000)
        assert end.summary.prefill_s is not None
        assert 0 < end.summary.prefill_s < end.summary.generate_s
        assert all(isinstance(chunk, Chunk) for chunk in chunks)
        lines = b"".join(chunk.data for chunk in chunks if isinstance(chunk, Chunk)).splitlines()
        assert len(lines) == 1000
        assert all("token" in msgspec.json.decode(line) for line in lines)


@on_loop
async def test_sequences_that_are_always_ready_share_the_loop(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        worker.submit(1, "a", tokens=100_000_000)
        await worker.until(lambda: worker.items(1))
        worker.submit(2, "b")
        end = (await worker.ended(2))[-1]
        assert isinstance(end, End)
        assert end.status == 200
        seen = len(worker.of(Stats))
        await worker.until(lambda: len(worker.of(Stats)) > seen)
        worker.link.send(Cancel(1))
        last = (await worker.ended(1))[-1]
        assert isinstance(last, Error)
        assert last.kind == "Cancelled"


@on_loop
async def test_an_error_before_the_first_token_has_a_status(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        for number, (prompt, status) in enumerate([("refuse", 424), ("raise", 424)], start=1):
            worker.submit(number, prompt)
            (reply,) = await worker.ended(number)
            assert isinstance(reply, Reply)
            assert reply.status == status
        worker.link.send(Submit(9, Input("completions", {}, [("data", b"{")])))
        (reply,) = await worker.ended(9)
        assert isinstance(reply, Reply)
        assert reply.status == 400


@on_loop
async def test_an_error_after_it_is_the_last_chunk(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        worker.submit(1, "token-then-raise")
        head, *chunks, end = await worker.ended(1)
        assert isinstance(head, Head)
        assert head.status == 200
        assert isinstance(chunks[-1], Chunk)
        assert b"raised after a token" in chunks[-1].data
        assert end == End(1, 424, "RuntimeError: raised after a token")
        worker.submit(2, "token-then-raise", stream=False)
        (reply,) = await worker.ended(2)
        assert isinstance(reply, Reply)
        assert reply.status == 424


@on_loop
async def test_a_sequence_without_a_finish_reason_is_the_handlers_error(tmp_path: Path) -> None:
    async with worker_of(tmp_path, "fault_handlers:UnfinishedHandler") as worker:
        worker.submit(1, "a", stream=False)
        (reply,) = await worker.ended(1)
        assert isinstance(reply, Reply)
        assert b"without a finish reason" in reply.data


@on_loop
async def test_a_cancellation_by_the_handler_itself_is_its_error(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        worker.submit(1, "cancel")
        (reply,) = await worker.ended(1)
        assert isinstance(reply, Reply)
        assert reply.status == 424
        for number, prompt in enumerate(["cancel", ["a", "cancel"]], start=2):
            worker.complete(number, prompt)
            (reply,) = await worker.ended(number)
            assert isinstance(reply, Reply)
            assert reply.status == 500
            assert b"the handler cancelled the request" in reply.data
        worker.submit(4, "token-then-cancel")
        assert (await worker.ended(4))[-1] == End(4, 424, "the handler cancelled the request")


@on_loop
async def test_one_request_does_not_crowd_out_the_others(tmp_path: Path) -> None:
    async with worker_of(tmp_path, max_rolling_batch_size="2") as worker:
        worker.complete(1, ["crowd"] * 20)
        (reply,) = await worker.ended(1)
        assert isinstance(reply, Reply)
        texts = [choice["text"] for choice in msgspec.json.decode(reply.data)["choices"]]
        assert len(texts) == 20
        assert set(texts) <= {"1", "2"}


@on_loop
async def test_every_submit_has_one_ending_even_when_it_is_cancelled_at_once(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        for number in range(1, 51):
            worker.submit(number, "wait")
            worker.link.send(Cancel(number))
        worker.link.send(Cancel(999))
        for number in range(1, 51):
            (error,) = await worker.ended(number)
            assert isinstance(error, Error)
            assert error.kind == "Cancelled"


@on_loop
async def test_a_command_that_the_handler_does_not_support_is_refused(tmp_path: Path) -> None:
    async with worker_of(tmp_path, "request_handlers:RequestFaults") as worker:
        worker.link.send(Control(-1, GetMetrics()))
        assert await worker.ended(-1) == [
            Error(-1, "RequestError", "the handler of this model does not support the operation metrics"),
        ]


@pytest.mark.parametrize("how", ["message", "signal"])
@on_loop
async def test_a_shutdown_finishes_what_runs(tmp_path: Path, how: str) -> None:
    async with worker_of(tmp_path, spawned=True) as worker:
        worker.submit(1, "a", tokens=20_000)
        await worker.until(lambda: worker.items(1))
        if how == "signal":
            worker.process.send_signal(signal.SIGINT)  # changes nothing
            worker.process.send_signal(signal.SIGTERM)
        else:
            worker.link.send(Shutdown(30))
        end = (await worker.ended(1))[-1]
        assert isinstance(end, End)
        assert end.status == 200
        await worker.lost.wait()
        assert await worker.process.wait() == 0


@on_loop
async def test_a_shutdown_ends_what_does_not_finish(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        worker.submit(1, "wait")
        worker.link.send(Shutdown(0.1))
        await worker.lost.wait()
        assert worker.items(1) == [], "the end of the link is its ending"
        assert await worker.process.wait() == 0


@on_loop
async def test_what_arrives_after_the_shutdown_is_left_to_another_worker(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        worker.link.send(Shutdown(30))
        worker.submit(1, "a")
        await worker.lost.wait()
        assert worker.items(1) == []


@on_loop
async def test_it_ends_with_its_front_end(tmp_path: Path) -> None:
    async with worker_of(tmp_path, spawned=True) as worker:
        worker.submit(1, "a", tokens=100_000_000)
        await worker.until(lambda: worker.items(1))
        worker.link.close()
        assert await worker.process.wait() == -signal.SIGKILL


@on_loop
async def test_a_failed_load_says_why_and_ends(tmp_path: Path) -> None:
    async with worker_of(tmp_path, "fault_handlers:FailingHandler", spawned=True) as worker:
        assert worker.of(Failed) == [Failed("ModelLoadError", "the weights are missing")]
        await worker.lost.wait()
        assert await worker.process.wait() == 1

"""A process that was forked, in the place of one that asyncio has spawned."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import cast


async def as_process(pid: int, stdout: int, stderr: int, exit_code: Callable[[], int]) -> Process:
    """Return the process `pid`, whose outputs are read from two pipes; `exit_code` is called once it has ended."""
    return cast(Process, _ForkedProcess(pid, await _reader(stdout), await _reader(stderr), exit_code))


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: _Output(reader), os.fdopen(descriptor, "rb"))
    return reader


class _Output(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # the transport closes itself; it would wait for what is written otherwise


class _ForkedProcess:
    """What lmi_server/supervisor and the tests use of asyncio's Process."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader, exit_code: Callable[[], int]
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self._exit_code = exit_code
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._on_end)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self._ended.done():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._handle, number)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self._ended.set_result(self._exit_code())

"""A worker that something else runs, perhaps on another machine: its connection takes the place of the process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lmi_server.contract.link import WorkerLink
from lmi_server.contract.protocol import Load
from lmi_server.supervisor.launch.worker_launch import WorkerLaunch

TOKEN_BYTES = 32
_ENDED = "is gone: its connection has ended"


class RemotePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker takes connections, and the token (TOKEN_BYTES characters) that opens one.

    `ahead` is the number of requests beside the current one, for a handler of batches.
    """

    host: str
    port: int
    token: str
    ahead: int = 0


class RemoteProgress:
    """The batches of a remote worker. Nothing is known of them: each request counts as begun once it is sent."""

    begun = sys.maxsize

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def running_s(self, now: float) -> float:
        return 0.0

    def ahead(self, now: float) -> int:
        return self._ahead

    def close(self) -> None:
        pass


class RemoteLaunch(WorkerLaunch):
    """The part of a launch that a remote worker has: no process of it is on this machine."""

    def __init__(self, place: RemotePlace) -> None:
        self.progress = RemoteProgress(place.ahead)

    @property
    def pids(self) -> Sequence[int]:
        return ()

    async def start(self, link: WorkerLink, load: Load, variables: Mapping[str, str]) -> Process:
        raise NotImplementedError("a remote worker is connected to, not started")


class RemoteProcess:
    """The connection to a remote worker, with the methods of `ChildProcess`. The end of the link is its end.

    `on_exit` gets how it ended, in words, and False: no memory of this machine ran out.
    """

    pid = None
    last_lines: Sequence[str] = ()

    def __init__(self, place: RemotePlace, on_exit: Callable[[str, bool], None]) -> None:
        self.killed = False
        self.exited = asyncio.Event()
        self._place = place
        self._on_exit = on_exit
        self._link: WorkerLink | None = None

    async def spawn(self, link: WorkerLink, load: Load, environment: Mapping[str, str]) -> None:
        """Connect `link`; the worker has the model already. Raises OSError."""
        place = self._place
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: link, place.host, place.port)
        self._link = link
        transport.write(place.token.encode())

    def link_lost(self) -> None:
        """Report the end of the worker."""
        if not self.exited.is_set():
            self.exited.set()
            self._on_exit(_ENDED, False)

    def kill(self) -> None:
        """Close the connection at once; the worker drops what it holds for this process."""
        self.killed = True
        if self._link is not None:
            self._link.abort()

    async def exit_within(self, limit_s: float) -> None:
        """Wait for the end of the link, for at most `limit_s` seconds."""
        if self._link is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self.exited.wait()

    async def wait_started(self) -> None:
        """Return: there is nothing to wait for."""

    async def reap(self) -> None:
        """Close the connection."""
        self.kill()

"""Starts a worker: as one process that inherits its link, or as an MPI group whose ranks connect to a socket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import struct
import tempfile
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lmi_server.contract.batch_progress import BatchProgress, HandlerProgress
from lmi_server.contract.link import Arrival, WorkerLink, worker_link
from lmi_server.contract.protocol import Failed, FromWorker, Load
from lmi_server.contract.ranks import RANK_BYTES, RankGroup
from lmi_server.machine.environment import process_environment, safe_ports
from lmi_server.machine.mpi import MpiRun, rank_of_line
from lmi_server.machine.ports import free_port
from lmi_server.processes.tree import session_members
from lmi_server.supervisor.launch.command import mpi_worker_command, progress_path, socket_path, worker_command

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
SHARED_MEMORY = Path("/dev/shm")  # directories there are from mkdtemp  # nosec B108
_ABANDONED_AFTER_S = 60.0  # ranks that outlive their server remove their directory within seconds


class WorkerLaunch(ABC):
    """One start of a worker."""

    progress: HandlerProgress  # set by `start`

    @abstractmethod
    async def start(self, link: WorkerLink, load: Load, variables: Mapping[str, str]) -> Process:
        """Start the process and connect `link` to it, with `load` as the first message. Raises OSError."""

    @property
    @abstractmethod
    def pids(self) -> Sequence[int]:
        """Return the processes that the worker cannot do without, as far as they are known."""

    def rank_of_line(self, line: str) -> tuple[int | None, str]:
        """Return the rank that wrote a line of the log (None if there are no ranks), and the line without its mark."""
        return None, line

    def close(self) -> None:
        """Release what `start` made. The processes must have ended."""
        self.progress.close()


class SingleProcess(WorkerLaunch):
    """A worker that is one process of the interpreter `python`.

    `socket_directory` names the variable that gets a directory of its own, if it is not empty: a process that is killed
    leaves its Unix sockets behind.
    """

    def __init__(self, python: str, socket_directory: str = "") -> None:
        self._python = python
        self._socket_directory = socket_directory
        self._directory: PrivateDirectory | None = None
        self._pid: int | None = None

    @property
    def pids(self) -> Sequence[int]:
        return () if self._pid is None else (self._pid,)

    async def start(self, link: WorkerLink, load: Load, variables: Mapping[str, str]) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            except BaseException:
                ours.close()
                raise
            link.send(load)
            return await self._execute(theirs, variables)

    async def _execute(self, link: socket.socket, variables: Mapping[str, str]) -> Process:
        self.progress, progress = BatchProgress.create()
        try:
            process = await _execute(
                worker_command(self._python, f"fd:{link.fileno()}", f"fd:{progress}"),
                {**variables, **self._make_directory()},
                (link.fileno(), progress),
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(progress)
        self._pid = process.pid
        return process

    def _make_directory(self) -> Mapping[str, str]:
        """Return the variable of the worker's own directory, if it gets one."""
        if not self._socket_directory:
            return {}
        remove_abandoned()
        self._directory = PrivateDirectory()
        return {self._socket_directory: self._directory.path}

    def close(self) -> None:
        super().close()
        if self._directory is not None:
            self._directory.remove()


class MpiGroup(WorkerLaunch):
    """A worker that is a group of ranks under mpirun. Its files, shared memory included, are in a directory of its own.

    The variable `socket_directory`, if it is not empty, names this directory too: engines make Unix sockets there.
    mpirun passes no file descriptors on to its ranks. So every rank connects to a Unix socket in that directory and
    sends its number; rank 0 gets the link. The end of a connection means that its rank is dead, and `on_rank_lost` gets
    the number. `on_failed` gets the reason if a rank other than 0 cannot load the model.
    """

    def __init__(
        self,
        python: str,
        mpirun: MpiRun,
        ranks: int,
        on_failed: Callable[[Failed], None],
        on_rank_lost: Callable[[int], None],
        socket_directory: str = "",
    ) -> None:
        self._python = python
        self._socket_directory = socket_directory
        self._mpirun = mpirun
        self._ranks = ranks
        self._on_failed = on_failed
        self._on_rank_lost = on_rank_lost
        self._links: dict[int, WorkerLink] = {}
        self._pids: dict[int, int] = {}
        self._launcher: int | None = None
        self._group: RankGroup | None = None
        self._directory: PrivateDirectory | None = None
        self._server: asyncio.Server | None = None
        self._link: WorkerLink
        self._load: Load

    @property
    def pids(self) -> Sequence[int]:
        """Return mpirun and its ranks; until all have connected, every process of the session: one may be a rank."""
        if self._launcher is None:
            return ()
        known = {self._launcher, *self._pids.values()}
        if len(self._links) < self._ranks:
            with contextlib.suppress(OSError):  # no file is free to look for them
                known |= {*session_members(self._launcher)}
        return list(known)

    def rank_of_line(self, line: str) -> tuple[int | None, str]:
        return rank_of_line(line)

    async def start(self, link: WorkerLink, load: Load, variables: Mapping[str, str]) -> Process:
        self._link, self._load = link, load
        port = free_port(safe_ports(process_environment()))
        remove_abandoned()
        self._directory = PrivateDirectory()
        group = self._group = RankGroup(self._ranks, self._directory.path, port)
        try:
            self.progress = BatchProgress.create_file(progress_path(group.directory))
        except OSError:
            self._directory.remove()
            raise
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: Arrival(RANK_BYTES, self._greet_rank), socket_path(group.directory)
            )
            inherited = {**process_environment(), **variables}
            own = {**group.environment(inherited), **self._mpirun.environment(group.directory)}
            if self._socket_directory:
                own[self._socket_directory] = group.directory
            process = await _execute(
                mpi_worker_command(self._python, self._mpirun, self._ranks, group.directory), {**variables, **own}
            )
        except BaseException:
            self.close()
            raise
        self._launcher = process.pid
        return process

    def _greet_rank(self, number: bytes, transport: asyncio.Transport) -> WorkerLink:
        """Return the link of a rank that has connected and sent its number; send it the Load."""
        rank = int.from_bytes(number, "big")
        link = self._link if rank == 0 else worker_link(self._on_message, lambda: self._on_lost(rank))
        self._links[rank] = link
        self._pids[rank] = _process_at(transport)
        link.send(self._load)  # written at the end of this tick: only then does the link have its transport
        return link

    def _on_message(self, message: FromWorker) -> None:
        if isinstance(message, Failed):
            self._on_failed(message)

    def _on_lost(self, rank: int) -> None:
        self._pids.pop(rank, None)
        self._on_rank_lost(rank)

    def close(self) -> None:
        super().close()
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close()
        if self._directory is not None:
            self._directory.remove()
        if self._group is not None:
            for path in SHARED_MEMORY.glob(self._group.litter):
                path.unlink(missing_ok=True)


def _process_at(transport: asyncio.Transport) -> int:
    """Return the process at the other end of a Unix socket.

    The kernel vouches for it: mpirun and containers would make a number that the process sends doubtful.
    """
    connection: socket.socket = transport.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process: int = _CREDENTIALS.unpack(credentials)[0]
    return process


async def _execute(command: Sequence[str], variables: Mapping[str, str], inherited: Sequence[int] = ()) -> Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        pass_fds=inherited,
        env={**process_environment(), **variables, "PYTHONUNBUFFERED": "1"},
    )


class PrivateDirectory:
    """A directory that only this user can open. Its lock tells other servers that it is in use."""

    def __init__(self) -> None:
        in_memory = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
        self.path = tempfile.mkdtemp(prefix=f"lmi-{os.getpid()}-", dir=SHARED_MEMORY if in_memory else None)
        self._lock = -1
        try:
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        _remove_tree(self.path)


def remove_abandoned() -> None:
    """Remove the directories of servers that were killed, unless a rank of a group has done it."""
    for path in _abandoned_directories():
        logger.info("removing %s, which a server that is gone has left in shared memory", path)
        _remove_tree(path)


def _remove_tree(path: str | Path) -> None:
    """Remove a directory, in which a worker may have made anything."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        logger.warning("%s holds too many directories within each other to be removed; remove it yourself", path)


def _abandoned_directories() -> Iterator[Path]:
    for path in SHARED_MEMORY.glob("lmi-*-*"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _ABANDONED_AFTER_S and _is_free(path):
                yield path


def _is_free(path: Path) -> bool:
    """Return whether no server holds the directory; the name has the number of the process that made it."""
    if Path("/proc", path.name.split("-")[1]).exists():
        return False
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a server in another container has another number
    finally:
        os.close(lock)
    return True

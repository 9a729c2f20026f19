"""The command that a worker is started with."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_server.machine.mpi import MpiRun


def worker_command(python: str, link: str, progress: str) -> Sequence[str]:
    """Return the command of a worker that is one process of the interpreter `python`.

    It inherits two file descriptors, "fd:N": its end of the link, and the page of its BatchProgress. With -P the
    working directory is not on its import path: a file there, such as a random.py beside weights, must not run.
    """
    return (python, "-P", "-m", "lmi_server.worker", "--link", link, "--progress", progress)


def mpi_worker_command(python: str, mpirun: MpiRun, ranks: int, directory: str) -> Sequence[str]:
    """Return the command of a worker that is a group of `ranks` processes; the first one has the link.

    Each of them connects to the Unix socket in `directory`, which belongs to the group alone.
    """
    link, progress = f"unix:{socket_path(directory)}", f"file:{progress_path(directory)}"
    return (*mpirun.command(ranks), *worker_command(python, link, progress))


def socket_path(directory: str) -> str:
    """Return the path of the socket on which the front end waits for the ranks of a group."""
    return f"{directory}/link"


def progress_path(directory: str) -> str:
    """Return the path of the page in which the first rank of a group counts its batches."""
    return f"{directory}/progress"

"""The command that a worker is started with."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def worker_command(link: str, progress: str) -> Sequence[str]:
    """Return the command of a worker that is one process.

    It inherits two file descriptors, "fd:N": its end of the link, and the page of its BatchProgress.
    """
    return (sys.executable, "-m", "lmi_server.worker", "--link", link, "--progress", progress)


def mpi_worker_command(link: str, progress: str, ranks: int) -> Sequence[str]:
    """Return the command of a worker that is a group of `ranks` processes, the first of which has the link."""
    launcher = ("mpirun", "-np", str(ranks), "--allow-run-as-root", "--bind-to", "none", "--tag-output")
    exported = ("-x", "PYTHONPATH", "-x", "CUDA_VISIBLE_DEVICES", "-x", "LD_LIBRARY_PATH", "-x", "MKL_DYNAMIC=FALSE")
    return (*launcher, *exported, *worker_command(link, progress))

"""The command that a worker is started with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def worker_command(link: Path) -> Sequence[str]:
    """Return the command of a worker that is one process and connects to the Unix socket at `link`."""
    return (sys.executable, "-m", "lmi_server.worker", "--link", str(link))


def mpi_worker_command(link: Path, ranks: int) -> Sequence[str]:
    """Return the command of a worker that is a group of `ranks` processes, the first of which connects to `link`."""
    launcher = ("mpirun", "-np", str(ranks), "--allow-run-as-root", "--bind-to", "none", "--tag-output")
    exported = ("-x", "PYTHONPATH", "-x", "CUDA_VISIBLE_DEVICES", "-x", "LD_LIBRARY_PATH", "-x", "MKL_DYNAMIC=FALSE")
    return (*launcher, *exported, *worker_command(link))

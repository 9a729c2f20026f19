"""The MPI launcher of this machine: its path, its implementation, and its command for a group of ranks."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

OPEN_MPI: Literal["Open MPI"] = "Open MPI"
MPICH: Literal["MPICH"] = "MPICH"
NO_MPIRUN = (
    "the MPI engine needs mpirun of Open MPI or MPICH, and there is none beside this Python or on the PATH; install"
    " lmi-server[mpi], or use engine=Python"
)

_VERSION = re.compile(r"\d+(\.\d+)+\w*")
_VERSION_LIMIT_S = 20.0
# The marks of a rank's lines: "[1,0]<stdout>: text" and "[12345,1]<stderr>:text" (Open MPI), "[0] text" (MPICH).
_TAG = re.compile(r"\[(?:\d+,)?(?P<rank>\d+)\](?:<std\w+>:)? ?")


@dataclass(frozen=True, slots=True)
class MpiRun:
    """An `mpirun`: its absolute path, and the MPI implementation that it belongs to, with its version."""

    path: str
    implementation: Literal["Open MPI", "MPICH"]
    version: str

    def command(self, ranks: int) -> Sequence[str]:
        """Return the beginning of a command that starts `ranks` processes on this machine and marks their output."""
        counted = (self.path, "-np", str(ranks))
        if self.implementation == MPICH:
            return (*counted, "-launcher", "fork", "-bind-to", "none", "-prepend-rank")
        marked = ("--tag-output",) if self.version.startswith(("3.", "4.")) else ("--output", "tag")
        return (*counted, "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *marked)

    def environment(self, directory: str) -> Mapping[str, str]:
        """Return variables that keep every file of the group, shared memory too, in `directory`."""
        if self.implementation == MPICH:
            return {}
        files = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
        sessions = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
        transport = {"OMPI_MCA_btl": "^tcp", "OMPI_MCA_pml": "ob1"}  # all ranks are on this machine
        return {**dict.fromkeys((*files, *sessions), directory), **transport}


def find_mpirun(environment: Mapping[str, str]) -> MpiRun | None:
    """Return the `mpirun` beside this Python, or the first on the PATH; None if there is none, or it is unknown."""
    beside = str(Path(sys.executable).parent)
    search = os.pathsep.join([beside, environment.get("PATH", os.defpath)])
    path = shutil.which("mpirun", path=search)
    return None if path is None else _identify(path)


def rank_of_line(line: str) -> tuple[int | None, str]:
    """Return the rank that wrote a line (None for the launcher itself), and the line without its mark."""
    tag = _TAG.match(line)
    return (None, line) if tag is None else (int(tag["rank"]), line[tag.end() :])


@functools.lru_cache
def _identify(path: str) -> MpiRun | None:
    try:
        banner = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_LIMIT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = _VERSION.search(banner)
    if version is None:
        return None
    if "Open MPI" in banner or "OpenRTE" in banner:
        return MpiRun(path, OPEN_MPI, version[0])
    return MpiRun(path, MPICH, version[0]) if "HYDRA" in banner else None

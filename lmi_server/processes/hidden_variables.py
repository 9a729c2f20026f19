"""Keeps the server's own secrets from processes of the same user, such as the code of a model in a worker.

/proc/PID/environ shows the variables that a process was started with, whatever it has removed since. So a server that
is given secrets as variables executes itself anew without them, and gets the values from a file in memory. The process
keeps its id, as process 1 of a container must.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lmi_server.machine.environment import (
    SECRETS_OF_SERVER,
    process_environment,
    remove_variables,
    set_variables,
)

_HANDED_OVER = "LMI_SERVER_SECRETS_FD"
_NAME = "lmi-server-secrets"
_PROC = Path("/proc")
_PR_SET_DUMPABLE = 4


def hide_secrets() -> None:
    """Execute this process anew without the variables that hold the server's secrets, or take these over afterwards.

    It must be called before threads start and files are opened. If the system allows no file in memory, or no new
    execution, the variables stay as they are.
    """
    environment = process_environment()
    handed_over = environment.get(_HANDED_OVER)
    if handed_over is not None:
        remove_variables([_HANDED_OVER])
        set_variables(_take_over(handed_over))
        return
    secrets = {name: environment[name] for name in SECRETS_OF_SERVER if environment.get(name)}
    if secrets and sys.executable and sys.platform == "linux":
        others = {name: value for name, value in environment.items() if name not in secrets}
        _execute_anew(secrets, others)


def keep_memory_private() -> None:
    """Have the kernel refuse other processes of this user the memory, the variables and the files of this one.

    That rules out core dumps and profilers without CAP_SYS_PTRACE. It holds for this process alone: what it executes,
    such as a worker, begins without it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def parents_with_secrets() -> Iterator[str]:
    """Yield "process 1 (tini)" for each process above this one whose variables show a secret of the server."""
    pid = os.getppid()
    while pid:
        try:
            names = {entry.partition(b"=")[0] for entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")}
            name, parent = _name_and_parent(pid)
        except OSError:
            return  # another user's, or gone
        if not names.isdisjoint(map(str.encode, SECRETS_OF_SERVER)):
            yield f"process {pid} ({name})"
        pid = parent


def _name_and_parent(pid: int) -> tuple[str, int]:
    before, _, after = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")
    return before.partition("(")[2], int(after.split()[1])


def _execute_anew(secrets: Mapping[str, str], others: Mapping[str, str]) -> None:
    file = None
    try:
        file = os.memfd_create(_NAME, 0)  # without MFD_CLOEXEC: the file outlives the execution
        with open(file, "wb", closefd=False) as opened:
            opened.write(json.dumps(secrets).encode())
        arguments = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, {**others, _HANDED_OVER: str(file)})
    except OSError:
        if file is not None:
            os.close(file)


def _take_over(descriptor: str) -> Mapping[str, str]:
    """Return the secrets in the file in memory, and close it; nothing if the variable names another file."""
    if not descriptor.isascii() or not descriptor.isdigit() or len(descriptor) > 9:
        return {}
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}"):
            return {}
    except OSError:
        return {}
    with open(int(descriptor), "rb") as opened:
        opened.seek(0)
        given = json.loads(opened.read())
    return {name: str(given[name]) for name in SECRETS_OF_SERVER if name in given}

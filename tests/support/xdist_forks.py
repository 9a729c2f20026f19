"""Has the processes of pytest-xdist fork from one that has imported what all tests do: 7 s of a processor for each.

What they start as forks of fault_server.py (forked_servers.py) forks from one that all of them share, as well.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from paths import MODEL_CODE, ROOT, TESTS

from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import shown_gpus

if TYPE_CHECKING:
    from execnet import XSpec  # pytest-xdist may not be installed
    from xdist.workermanage import WorkerController

TEMPLATE_PATHS = {"PYTHONPATH": os.pathsep.join(map(str, (MODEL_CODE, TESTS / "support", ROOT)))}
"""The variable of a process that fault_server.py forks from."""

template_socket = ""
"""Where such a process listens that all processes of pytest-xdist share; empty if there is none."""

_TEMPLATE_SOCKET = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[XSpec]) -> None:
    """Start the process that forks, if there are several of them, none measures its coverage, and there is no GPU.

    CUDA cannot be used in a fork of a process that has looked for devices, as many modules do when they are imported.
    """
    arguments = list(map(str, config.invocation_params.args))
    _, gpus = shown_gpus(process_environment())
    if len(specs) < 2 or gpus or any(argument.startswith("--cov") for argument in arguments):
        return
    directory = tempfile.TemporaryDirectory(prefix="tests-")
    path, config.stash[_TEMPLATE_SOCKET] = (str(Path(directory.name) / name) for name in ("forks", "templates"))
    program = [str(MODEL_CODE / "forked_pytest.py"), json.dumps(sys.path), *arguments]
    # What a module computes when it is imported would start threads, which the forks had not and would wait for.
    processes = [_listening(path, program, {"OMP_NUM_THREADS": "1"})]
    program = [str(MODEL_CODE / "fault_server.py"), "--templates"]
    processes.append(_listening(config.stash[_TEMPLATE_SOCKET], program, TEMPLATE_PATHS))
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-I", "-S", str(MODEL_CODE / "fork_requests.py"), path])

    def end() -> None:
        for process in processes:
            process.kill()
            process.wait()
        directory.cleanup()

    config.add_cleanup(end)


def _listening(path: str, program: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program, whose last argument is the descriptor of a socket that listens at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        given = listener.fileno()
        command = [sys.executable, *program, str(given)]
        return subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.DEVNULL, pass_fds=[given])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["template_socket"] = node.config.stash.get(_TEMPLATE_SOCKET, "")


def pytest_configure(config: pytest.Config) -> None:
    global template_socket
    template_socket = getattr(config, "workerinput", {}).get("template_socket", "")

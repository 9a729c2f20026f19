"""Has the processes of pytest-xdist fork from one that has imported what all tests do: 7 s of a processor for each."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from paths import MODEL_CODE

from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import shown_gpus

if TYPE_CHECKING:
    from execnet import XSpec  # pytest-xdist may not be installed


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
    path = str(Path(directory.name) / "forks")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        given = listener.fileno()
        command = [sys.executable, str(MODEL_CODE / "forked_pytest.py"), str(given), path, json.dumps(sys.path)]
        # What a module computes when it is imported would start threads, which the forks had not and would wait for.
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*command, *arguments], env=variables, stdin=subprocess.DEVNULL, pass_fds=[given])
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-I", "-S", str(MODEL_CODE / "fork_requests.py"), path])

    def end() -> None:
        process.kill()
        process.wait()
        directory.cleanup()

    config.add_cleanup(end)

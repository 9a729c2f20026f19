"""The processes of vLLM's engine, and what compiles for it, as forks of a process that has imported vLLM.

For tests only.

`python forked_engines.py ARGUMENTS...` is `python -m vllm.entrypoints.openai.api_server ARGUMENTS...`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_requests


def install() -> None:
    """Have the engines of this process fork: on the CPU, vLLM overrides the variable that would say so."""
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        vars(import_module(name))["get_mp_context"] = lambda: multiprocessing.get_context("fork")


def install_compiler() -> None:
    """Have what compiles for this process be a fork: of another process, for this one will have threads by then.

    What the libraries have read from variables when they were imported stays. There is one compilation.
    """
    background = import_module("handlers.vllm.compilation.background")
    directory = Path(tempfile.mkdtemp(prefix="compiler-"))
    path = str(directory / "forks")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        if os.fork() == 0:
            import_module("lmi_server.processes.parents").end_with_parent()
            _be_compiler(background, fork_requests.Forks(listener, lambda _: shutil.rmtree(directory)).next_fork())

    def start(command: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-I", "-S", fork_requests.__file__, path, *command], **more)

    vars(background)["subprocess"] = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)


def _be_compiler(background: Any, asked: fork_requests.Asked) -> None:
    with import_module("forked_workers").as_another_process():
        os.environ.clear()
        os.environ.update(asked.variables)
        for number, file in enumerate(asked.files):
            os.dup2(file, number)
        sys.stdin = os.fdopen(0)
        *_, directory, _ = asked.words
        sys.argv = [background.__file__, directory, str(os.getppid())]  # the worker is no parent of a fork
        try:
            background.main()
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            raise


if __name__ == "__main__":
    install()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

"""The processes of vLLM's engine as forks: the process that makes the engine has imported vLLM. For tests only.

`python forked_engines.py ARGUMENTS...` is `python -m vllm.entrypoints.openai.api_server ARGUMENTS...`.
"""

from __future__ import annotations

import multiprocessing
import runpy
from importlib import import_module


def install() -> None:
    """Have the engines of this process fork: on the CPU, vLLM overrides the variable that would say so."""
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        vars(import_module(name))["get_mp_context"] = lambda: multiprocessing.get_context("fork")


if __name__ == "__main__":
    install()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

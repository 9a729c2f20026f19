"""Compiles a model on the CPU while it already serves, in a process of its own, and then computes with that code.

On the CPU compiled code decodes 1.2 to 1.8 times as fast as the model's own, and takes a minute or more to make. vLLM
keeps it below VLLM_CACHE_ROOT, where a later start finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from handlers.vllm import library
from lmi_server.machine.memory import free_and_total
from lmi_server.machine.process_tree import end_with_parent

_log = logging.getLogger(__name__)

_GIB = 2**30
_SPARE_BYTES = 2 * _GIB  # that the compiler takes beside the weights
_OUT_OF_MEMORY_SCORE = Path("/proc/self/oom_score_adj")


class BackgroundCompilation:
    """Makes code for the models that an engine of this process has loaded without, and lets them run it.

    `arguments` are the engine's, `kv_bytes` what it needs of a KV cache at least; `models` are those that
    `library.serve_before_compiled` finds. `environment` is that of this process before it made the engine's
    configuration.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        kv_bytes: int,
        models: list[library.UncompiledModel],
        environment: Mapping[str, str],
    ) -> None:
        self._models = models
        self._kv_bytes = kv_bytes
        self._arguments = arguments
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin, where some model has no code yet."""
        if not self._models:
            return
        wanted = sum(model.weight_bytes for model in self._models) + self._kv_bytes + _SPARE_BYTES
        free, _ = free_and_total()
        if free < wanted:
            _log.warning(
                "the model goes on uncompiled: to compile it %.1f GiB of memory would be needed and %.1f are free",
                wanted / _GIB,
                free / _GIB,
            )
            return
        _log.info("serving uncompiled code while vLLM compiles the model in the background")
        Thread(target=self._run, name="compilation", daemon=True).start()

    def stop(self) -> None:
        """End what goes on in the background."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            code, printed = self._compile()
        except (OSError, pickle.PicklingError) as error:
            code, printed = 1, str(error)
        if self._stopped:
            return
        reason = printed.strip().rpartition("\n")[2] or (f"it was ended by signal {-code}" if code < 0 else "")
        not_usable = [] if code else [str(model.path) for model in self._models if not model.use_compiled()]
        if code:
            _log.warning("the model goes on uncompiled, vLLM could not compile it (exit code %d): %s", code, reason)
        elif not_usable:
            _log.warning("the model goes on uncompiled, the compiled code cannot be used: %s", ", ".join(not_usable))
        else:
            _log.info("compiled in %.0f s; the compiled code runs from now on", time.monotonic() - began)

    def _compile(self) -> tuple[int, str]:
        """Return the exit code of the compiling process, and what it printed of errors."""
        command = [sys.executable, "-m", "handlers.vllm.compilation"]
        command += [str(self._models[0].path.parent), str(os.getpid())]
        with subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as self._process:
            if self._stopped:
                self._process.kill()
            printed = self._process.communicate(pickle.dumps(self._arguments))[1]
        return self._process.returncode, printed.decode(errors="replace")


def compile_models(arguments: Mapping[str, Any], directory: Path) -> None:
    """Have vLLM compile the models of an engine, unless their code is stored; one process of a machine at a time.

    `arguments` are the engine's; `directory` is where the code will be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library.compile_models(arguments)


def main() -> None:
    """Compile what standard input says, in the way of nobody."""
    directory, worker = Path(sys.argv[1]), int(sys.argv[2])
    end_with_parent()
    if os.getppid() != worker:  # it ended while this process imported vLLM
        return
    os.nice(19)  # the cores belong to the requests
    with contextlib.suppress(OSError):
        _OUT_OF_MEMORY_SCORE.write_text("1000")  # and so does the memory
    try:
        compile_models(pickle.load(sys.stdin.buffer), directory)
    # The border to vLLM and its compilers: whatever they raise is told in one line, and the worker goes on.
    except Exception as error:  # noqa: BLE001
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()

"""Compiles a model on the CPU while it already serves, in a process of its own.

On the CPU compiled code decodes 1.2 to 1.8 times as fast as uncompiled code, but takes a minute or more to make. So the
model serves uncompiled at once. A child of the worker loads the same model with the same configuration, compiles it and
stores the code, with the lowest priority, and mostly while no requests run (`duty_cycle.py`). The worker then changes
over to the stored code (`stored_code.py`), and later starts find it stored.

A process, not a thread: torch's compiler holds the GIL for seconds at a time, and a crash or a lack of memory must not
end the requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from handlers.vllm.compilation.duty_cycle import wait_while_pausing
from lmi_server.machine.memory import free_and_total
from lmi_server.processes import model_imports
from lmi_server.processes.parents import end_group_with_parent

if TYPE_CHECKING:
    from handlers.vllm.compilation.stored_code import UncompiledModel

logger = logging.getLogger(__name__)

_GIB = 2**30
_COMPILER_BYTES = 2 * _GIB  # what the compiling process needs beside the weights and the KV cache
_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")


class BackgroundCompilation:
    """Compiles the models that an engine of this process runs uncompiled, and then lets them run the code.

    `arguments` are the engine's, and `kv_bytes` is the smallest KV cache that it accepts. `models` is the list that
    `serve_before_compiled` returned, filled by the time of `start`. `environment` is that of this process before it
    made the engine's configuration.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        kv_bytes: int,
        models: list[UncompiledModel],
        environment: Mapping[str, str],
    ) -> None:
        self._models = models
        self._kv_bytes = kv_bytes
        self._arguments = arguments
        self._environment = environment
        self._stopped = Event()

    def start(self, is_busy: Callable[[], bool]) -> None:
        """Start to compile, if a model has no stored code and there is memory for a second copy of the weights.

        `is_busy` says whether requests run; another thread calls it.
        """
        if not self._models:
            return
        needed = sum(model.weight_bytes for model in self._models) + self._kv_bytes + _COMPILER_BYTES
        free, _ = free_and_total()
        if free < needed:
            logger.warning(
                "the model goes on uncompiled: to compile it %.1f GiB of memory would be needed and %.1f are free",
                needed / _GIB,
                free / _GIB,
            )
            return
        logger.info("serving uncompiled code while vLLM compiles the model in the background")
        Thread(target=self._run, args=(is_busy,), name="compilation", daemon=True).start()

    def stop(self) -> None:
        """End the compiling process."""
        self._stopped.set()

    def _run(self, is_busy: Callable[[], bool]) -> None:
        began = time.monotonic()
        try:
            code, errors = self._compile(is_busy)
        except (OSError, pickle.PicklingError) as error:
            code, errors = 1, str(error)
        if self._stopped.is_set():
            return
        reason = errors.strip().rpartition("\n")[2] or (f"it was ended by signal {-code}" if code < 0 else "")
        not_usable = [] if code else [str(model.path) for model in self._models if not model.use_compiled()]
        if code:
            logger.warning("the model goes on uncompiled, vLLM could not compile it (exit code %d): %s", code, reason)
        elif not_usable:
            logger.warning("the model goes on uncompiled, the compiled code cannot be used: %s", ", ".join(not_usable))
        else:
            logger.info("compiled in %.0f s; the compiled code runs from now on", time.monotonic() - began)

    def _compile(self, is_busy: Callable[[], bool]) -> tuple[int, str]:
        """Run the compiling process to its end; return its exit code and its standard error."""
        command = [sys.executable, "-P", "-m", "handlers.vllm.compilation.background"]
        command += [str(self._models[0].path.parent), str(os.getpid())]
        with tempfile.TemporaryFile() as arguments, tempfile.TemporaryFile() as errors:
            pickle.dump(self._arguments, arguments)
            arguments.seek(0)
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=arguments,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                process_group=0,  # with its compilers: all can be stopped at once
            )
            code = wait_while_pausing(process, is_busy, self._stopped)
            errors.seek(0)
            return code, errors.read().decode(errors="replace")


def compile_models(arguments: Mapping[str, Any], directory: Path) -> None:
    """Let vLLM compile the models of an engine and store their code, unless it is stored already.

    `arguments` are the engine's; `directory` is where the code will be. A lock there lets one process of a machine
    compile at a time: workers that start together would all compile the same model, and the first one's code serves
    all of them.
    """
    from handlers.vllm.compilation import (
        stored_code,  # imported late: vLLM takes seconds, and a worker may end meanwhile
    )

    model_imports.freeze_libraries()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored_code.compile_models(arguments)


def main() -> None:
    """Compile the job read from stdin at the lowest priority. Arguments: directory of the code, worker's process id."""
    directory, worker = Path(sys.argv[1]), int(sys.argv[2])
    end_group_with_parent()
    if os.getppid() != worker:  # it ended before end_group_with_parent could see it
        return
    model_imports.prepare()
    os.nice(19)  # requests have the first claim on the cores
    with contextlib.suppress(OSError):
        _OOM_SCORE_ADJ.write_text("1000")  # and on the memory: the kernel kills this process before the worker
    try:
        # Pickle, because the arguments may hold objects of vLLM; they come from the parent process alone.
        compile_models(pickle.load(sys.stdin.buffer), directory)  # nosec B301
    # The border to vLLM and its compilers: the last line on stderr reports whatever they raise, and the worker goes on.
    except Exception as error:  # noqa: BLE001
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()

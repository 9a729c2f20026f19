"""What a process does around the import of the libraries that load a model, which takes most of a worker's start."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import shown_gpus

# The libraries make about two million objects that stay to the end. The usual thresholds (700, 10, 10) have the garbage
# collector walk all of them dozens of times. It is not switched off, since loading a large model leaves garbage too.
_WHILE_LOADING = (100_000, 50, 1000)
_SERVING = gc.get_threshold()


def prepare() -> None:
    """Make the imports that follow cheap. Call it first thing in a process that will load a model."""
    gc.set_threshold(*_WHILE_LOADING)


def freeze_libraries() -> None:
    """Keep the libraries out of the garbage collections of a load, if all of them are imported before it.

    vLLM has the collector walk all objects up to eight times while it loads a model, which takes half a second each
    time. The imports leave hardly any garbage, so none has to be collected before.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind would report what is never collected as leaks, a hundred lines of log


def finish_loading() -> None:
    """Have the garbage collector work as usual, but for all that exists by now: it stays until the end.

    Without the freeze, every full collection would walk all objects of the libraries, and all streams would stop for
    that long.
    """
    if gc.get_threshold() == _WHILE_LOADING:  # else the model's own code has chosen
        gc.set_threshold(*_SERVING)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def hide(library: str) -> Iterator[None]:
    """Have imports of `library` fail meanwhile, as if it were not installed, unless it is imported already."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]  # which is how Python marks a module that must not be found
    try:
        yield
    finally:
        del sys.modules[library]


def hide_triton() -> AbstractContextManager[None]:
    """Return a context in which imports do not find Triton, which compiles for GPUs, if this process has no GPU.

    PyTorch imports it wherever it is installed. When the process ends, Triton reports all that it holds as leaks, a
    hundred lines of log.
    """
    _, gpus = shown_gpus(process_environment())
    return contextlib.nullcontext() if gpus else hide("triton")

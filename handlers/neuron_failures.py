"""Turns what Neuron's libraries raise into errors of this project: the border to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from handlers.step_loop import EngineLostError
from lmi_server.contract.errors import (
    LmiServerError,
    ModelLoadError,
    ModelMemoryError,
    describe,
    is_out_of_memory,
    message_of,
)

# Parts of the messages of Neuron's runtime. NRT_RESOURCE, status 4, is its code for a lack of memory.
_NO_MEMORY = ("status=4", "Allocation Failure", "NRT_RESOURCE")
_NO_DEVICE = ("could not be initialized", "Neuron Driver", "no neuron device", "NRT_UNINITIALIZED")
_COMPILER = ("neuronxcc failed", "neuronx-cc", "CompilerInternalError")
_RUNTIME = ("nrt_", "NRT_", "NEURON_RT", "Neuron Runtime")


TEXT_SIZES = "option.max_rolling_batch_size or option.n_positions"
"""The keys that make the graphs of a language model smaller."""


@contextmanager
def failures_of_load(library: str, path: str, sizes: str = TEXT_SIZES) -> Iterator[None]:
    """Raise ModelLoadError or ModelMemoryError, with the remedy, for anything that loading or compiling raises.

    `sizes` names the keys whose lower values make the graphs smaller.
    """
    try:
        yield
    except LmiServerError:
        raise
    except EngineLostError as error:  # the first step, which is a part of the load
        raise ModelLoadError(f"{library} cannot compute with {path}: {error}") from error
    except Exception as error:  # the border to the library: it raises anything from AssertionError to RuntimeError
        text = message_of(error)
        if is_out_of_memory(error) or _any(_NO_MEMORY, text):
            raise ModelMemoryError(
                f"{path} does not fit the memory of its Neuron cores ({describe(error)}); raise"
                f" option.tensor_parallel_degree, or lower {sizes}"
            ) from error
        raise ModelLoadError(f"{library} cannot load {path}: {describe(error)}{_remedy(error, text)}") from error


def _remedy(error: Exception, text: str) -> str:
    if _any(_NO_DEVICE, text):
        return "; no Neuron device can be used here: neuron-ls lists them, and NEURON_RT_VISIBLE_CORES hides some"
    if _any(_COMPILER, text):
        return "; the compiler's log says more, and option.neuron_optimize_level=1 asks least of it"
    if isinstance(error, FileNotFoundError) and "NEFF" in text:
        return (
            "; the graphs were compiled for other values of n_positions, context_length_estimate,"
            " max_rolling_batch_size, tensor_parallel_degree or dtype: give these, or run lmi-server partition again"
        )
    return ""


@contextmanager
def failures_of_step() -> Iterator[None]:
    """End the process if the Neuron runtime fails: a core that has failed answers no further request.

    Any other exception ends the requests of the step alone.
    """
    try:
        yield
    except RuntimeError as error:
        if _any(_RUNTIME, message_of(error)):
            raise EngineLostError(f"the Neuron runtime failed: {describe(error)}") from error
        raise


def _any(parts: tuple[str, ...], text: str) -> bool:
    return any(part in text for part in parts)

"""From a Load message to a handler that can start, and what the front end is told where it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from lmi_server.configuration.handlers import load as load_class
from lmi_server.configuration.options import ModelOptions
from lmi_server.configuration.resolve import rebuild_options
from lmi_server.dialects.base import ServedModel
from lmi_server.errors import LmiServerError, ModelLoadError, ModelMemoryError
from lmi_server.handler import LLMHandler, ModelInfo, RequestHandler
from lmi_server.protocol import Load

# What engines raise for want of memory, beside MemoryError: CUDA's own, torch's by class name, vLLM's, and what torch
# says when the host has none left.
_OUT_OF_MEMORY_CLASS = "OutOfMemoryError"
_OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "No available memory for the cache blocks",
    "can't allocate memory",
    "Cannot allocate memory",
)


@dataclass(frozen=True, slots=True)
class Loading:
    """What a handler is started with."""

    load: Load
    options: ModelOptions

    @property
    def model_dir(self) -> str:
        return self.load.model_dir

    def served_model(self, info: ModelInfo) -> ServedModel:
        """Return what the dialects may know of the model."""
        return ServedModel(
            name=self.load.model_name,
            served_names=tuple(self.load.served_names),
            output_formatter=self.options.output_formatter,
            tgi_compat=self.options.tgi_compat,
            features=info.features,
            sampling_defaults=info.sampling_defaults,
            max_model_len=info.max_model_len,
        )


def make_handler(load: Load) -> tuple[LLMHandler | RequestHandler, Loading]:
    """Import the handler and rebuild its options; it is not started. Raises whatever its module raises."""
    options = rebuild_options(load.handler, load.options)
    handler = cast("type[LLMHandler | RequestHandler]", load_class(load.handler))()
    return handler, Loading(load, options)


def load_failure(error: Exception) -> LmiServerError:
    """Return what the front end is told of an exception that ended a load."""
    message = error.message if isinstance(error, LmiServerError) else f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return ModelMemoryError(message)
    return error if isinstance(error, LmiServerError) else ModelLoadError(message)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether `error`, or what caused it, is a want of memory of host or device."""
    if error is None:
        return False
    if isinstance(error, MemoryError) or type(error).__name__ == _OUT_OF_MEMORY_CLASS:
        return True
    return any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS) or is_out_of_memory(error.__cause__)

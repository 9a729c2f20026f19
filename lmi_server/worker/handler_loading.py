"""From a Load message to a handler ready to start, and from its failure to the front end's error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from lmi_server.configuration.handlers import load as load_class
from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import LmiServerError, ModelLoadError, ModelMemoryError, describe, is_out_of_memory
from lmi_server.contract.handler import LLMHandler, ModelInfo, RequestHandler
from lmi_server.contract.protocol import Adapter, Load
from lmi_server.dialects import FORMATTER_NAMES
from lmi_server.dialects.base import ServedModel
from lmi_server.media.budget import limit_media


@dataclass(frozen=True, slots=True)
class Loading:
    """What a handler starts with: the Load message, and the options in it as the handler's own class."""

    load: Load
    options: ModelOptions

    @property
    def model_dir(self) -> str:
        return self.load.model_dir

    def served_model(self, info: ModelInfo, adapters: Mapping[str, Adapter]) -> ServedModel:
        """Return what the dialects may know of the model. `adapters` are the handler's, and may change."""
        options = self.options
        formatter = options.output_formatter if options.output_formatter in FORMATTER_NAMES else None
        asynchronous = options.is_async_service
        names = tuple(self.load.served_names)
        return ServedModel(
            name=self.load.model_name,
            # The service calls a model without another name "lmi". The first name is that of the answers.
            served_names=(*(names[1:] or ("lmi",)), names[0]) if asynchronous else names,
            output_formatter=formatter,  # None too if it is a function of model.py
            tgi_compat=options.tgi_compat,
            async_service=asynchronous and formatter is None and not options.tgi_compat,
            samples=options.samples,
            adapters=adapters,
            features=info.features,
            sampling_defaults=info.sampling_defaults,
            max_model_len=info.max_model_len,
        )


def make_handler(load: Load) -> tuple[LLMHandler | RequestHandler, Loading]:
    """Import the handler, create it, and restore its options; do not start it. Raises whatever its module raises."""
    options_type = cast("type[ModelOptions]", load_class(load.options_type))
    options = options_type.restore(load.options, load.passed_through)
    limit_media(options.max_media_size)
    handler = cast("type[LLMHandler | RequestHandler]", load_class(load.handler))()
    if isinstance(handler, RequestHandler):
        handler.served_names = tuple(load.served_names)
    return handler, Loading(load, options)


def load_failure(error: BaseException) -> LmiServerError:
    """Return the error that the front end gets if `error` ended a load."""
    message = error.message if isinstance(error, LmiServerError) else describe(error)
    if is_out_of_memory(error):
        return ModelMemoryError(message)
    return error if isinstance(error, LmiServerError) else ModelLoadError(message)

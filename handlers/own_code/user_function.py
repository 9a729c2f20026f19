"""A user's function in LMI's contract: how it loads its model, and which answer an exception of it becomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from djl_python.inputs import Input, make_input
from djl_python.outputs import Output

from handlers.own_code.djl.inputs import InputBuilder
from handlers.own_code.djl.outputs import OUT_OF_MEMORY, error_response
from handlers.user_code import format_user_error
from lmi_server.contract.errors import (
    HandlerError,
    LmiServerError,
    ModelLoadError,
    ModelMemoryError,
    describe,
    is_out_of_memory,
    message_of,
)
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Input as Request
from lmi_server.dialects.routes import LMI_ROUTES

logger = logging.getLogger(__name__)


class UserFunction:
    """The function with its inputs: `call` is the function itself, `inputs` makes the Input of a request."""

    def __init__(
        self, function: Callable[[Input], Any], inputs: InputBuilder, initial: Mapping[str, Any], model_dir: str
    ) -> None:
        self.call = function
        self.inputs = inputs
        self.model_dir = model_dir
        self._initial = initial

    def load(self) -> Any:
        """Call the function without content, LMI's request to load the model; return what the function returns."""
        return self.call(make_input(self._initial, [], self._initial["handler"]))

    def check_loaded(self, output: Any) -> None:
        """Raise ModelLoadError (ModelMemoryError for status 507) if the `output` of `load` reports a failure."""
        if output is None:
            return
        if not isinstance(output, Output):
            raise ModelLoadError(
                f"the handler returned a {type(output).__name__} when it was called to load the model; "
                "return an Output or None"
            )
        if output.code >= 300:
            body = b"".join(map(bytes, output.content.values)).decode(errors="replace")
            error = ModelMemoryError if output.code == OUT_OF_MEMORY else ModelLoadError
            raise error(f"Failed to initialize model: {output.message} {body}".rstrip())

    def failure(self, request: Request, error: BaseException) -> Response | LmiServerError:
        """Log an exception and return the answer to the request that it ended."""
        if isinstance(error, LmiServerError):
            return error
        logger.error("request %s: %s", request.request_id, format_user_error(error, self.model_dir), exc_info=error)
        memory = is_out_of_memory(error)
        if request.route not in LMI_ROUTES:
            return ModelMemoryError(describe(error)) if memory else HandlerError(describe(error))
        # LMI reports the message of an exception without its class.
        message = message_of(error) if isinstance(error, Exception) else describe(error)
        return error_response(message, OUT_OF_MEMORY) if memory else error_response(message)

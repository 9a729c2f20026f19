"""A `handle` in the model.py beside a built-in handler for text generation: LMI's custom handler.

It gets every request first. What it returns is the answer; None leaves the request to the built-in handler.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import ModuleType

from djl_python.inputs import make_input

from handlers.own_code.djl.adapters import await_result
from handlers.own_code.djl.async_functions import response_of
from handlers.own_code.djl.inputs import InputBuilder
from handlers.own_code.djl.outputs import FAILED, OUT_OF_MEMORY, piece_error
from handlers.user_code import DEFAULT_ENTRY_POINT, format_user_error, load_file
from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import EXITS, LmiServerError, ModelLoadError, describe, is_out_of_memory, message_of
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Input as Request

logger = logging.getLogger(__name__)

_HANDLE = "handle"
_JSON = [("content-type", "application/json")]


def load_custom_handler(model_dir: str, options: ModelOptions) -> CustomHandler | None:
    """Return the function `handle` of the model.py in `model_dir`; None if there is none.

    Raises ModelLoadError with file and line if model.py cannot be imported.
    """
    path = Path(model_dir, DEFAULT_ENTRY_POINT)
    if not path.is_file():
        return None
    try:
        module = load_file(path)
    except BaseException as error:  # the border to the user's code
        raise ModelLoadError(f"{path} cannot be imported: {format_user_error(error, model_dir)}") from error
    return CustomHandler(module, model_dir, options) if callable(getattr(module, _HANDLE, None)) else None


class CustomHandler:
    """Calls the function for each request, concurrently if it is asynchronous."""

    def __init__(self, module: ModuleType, model_dir: str, options: ModelOptions) -> None:
        self._function = getattr(module, _HANDLE)
        self._model_dir = model_dir
        common = {"model_dir": model_dir, "device_id": "-1", "cluster_size": 1}
        self._initial = {**_properties(options), **common, "handler": _HANDLE}
        self._inputs = InputBuilder(_HANDLE, common, may_choose_handler=False)

    async def answers_load(self) -> bool:
        """Call the function without content; return whether it answers, so that the built-in handler need not load.

        As with LMI, the load does not fail with it: the log has its exception, and so do the answers to requests.
        """
        try:
            return await await_result(self._function(make_input(self._initial, [], _HANDLE))) is not None
        except EXITS:
            raise
        except BaseException as error:  # the border to the user's code
            logger.exception("%s", format_user_error(error, self._model_dir))
            return True

    async def answer(self, request: Request) -> Response | None:
        """Return the answer of the function; None if it leaves the request to the built-in handler.

        Raises RequestError if the request is no valid form or sets `handler`.
        """
        given = self._inputs.one(request)
        try:
            result = await await_result(self._function(given))
            return None if result is None else await response_of(result)
        except (asyncio.CancelledError, LmiServerError, *EXITS):
            raise
        except BaseException as error:  # the border to the user's code
            logger.exception("request %s: %s", request.request_id, format_user_error(error, self._model_dir))
            reason = message_of(error) if isinstance(error, Exception) else describe(error)
            code = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
            return piece_error(f"Custom handler failed: {reason}", code, _JSON)


def _properties(options: ModelOptions) -> dict[str, str]:
    """Return the configuration as texts, which LMI's code reads."""
    values = options.model_dump(mode="json", exclude_none=True)
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return texts | dict(options.passed_through)

"""The function `handle` of a model.py beside a built-in handler: it gets every request before that one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.handlers import load as load_by_name
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Input
from lmi_server.worker.handler_loading import Loading


class CustomCode(Protocol):
    """What `HandlerTable.custom_handler` loads."""

    async def answers_load(self) -> bool:
        """Have the code load its model; return whether the built-in handler need not load one."""

    async def answer(self, request: Input) -> Response | None:
        """Return the answer of the code; None if the built-in handler is to answer."""


def load_custom_handler(loading: Loading) -> CustomCode | None:
    """Return the function of the model's code; None if there is none, or if it is the handler itself.

    Raises ModelLoadError with file and line.
    """
    spec = HANDLERS.by_handler(loading.load.handler)
    if (spec is not None and spec.runs_user_code) or not Path(loading.model_dir, "model.py").is_file():
        return None
    load = cast("Callable[..., CustomCode | None]", load_by_name(HANDLERS.custom_handler))
    return load(loading.model_dir, loading.options)

"""Calls the function `handle` of a model.py, for code that is a handler and leaves requests to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from djl_python.async_utils import create_non_stream_output
from djl_python.inputs import Input
from djl_python.service_loader import ModelService, has_function_in_module, load_model_service

logger = logging.getLogger(__name__)


class CustomHandlerError(Exception):
    """The function raised `original_exception`."""

    def __init__(self, message: str, original_exception: BaseException) -> None:
        super().__init__(message)
        self.original_exception = original_exception
        self.__cause__ = original_exception


class CustomHandlerService:
    """`initialized` says whether the model.py in the property `model_dir` has an asynchronous function `handle`."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.custom_handler: ModelService | None = None
        directory = properties.get("model_dir", ".")
        if os.path.isfile(os.path.join(directory, "model.py")):
            service = load_model_service(directory, "model.py", -1)
            self.custom_handler = service if has_function_in_module(service.module, "handle") else None
        self.initialized = self.custom_handler is not None

    async def handle(self, inputs: Input) -> Any:
        """Return the answer of the function, or one that says how it failed; None without a function."""
        if self.custom_handler is None:
            return None
        try:
            return await self.custom_handler.invoke_handler_async("handle", inputs)
        except Exception as error:  # the border to the user's code
            logger.exception("the custom handler raised")
            return create_non_stream_output("", error=f"Custom handler failed: {error}", code=424)

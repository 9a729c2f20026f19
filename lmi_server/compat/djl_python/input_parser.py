"""Decorators for the functions of a `model.py` that replace parts of a built-in handler, and LMI's parser of requests.

Of several functions with the same decorator, the first in the file counts. The parser is for code that batches itself,
and for an input formatter that changes a part of LMI's parsing. It is imported when it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["SAGEMAKER_ADAPTER_IDENTIFIER_HEADER", "init_handler", "input_formatter", "prediction_handler"]

F = TypeVar("F", bound=Callable[..., Any])

SAGEMAKER_ADAPTER_IDENTIFIER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def input_formatter(function: F) -> F:
    """Mark the function that parses requests: `fn(input, **kwargs) -> TextInput`, or `fn(body, **kwargs) -> body`."""
    function.is_input_formatter = True  # type: ignore[attr-defined]
    return function


def prediction_handler(function: F) -> F:
    """Mark the function that predicts instead of a scikit-learn or XGBoost model: `fn(inputs, model)`."""
    function.is_prediction_handler = True  # type: ignore[attr-defined]
    return function


def init_handler(function: F) -> F:
    """Mark the function that loads a scikit-learn or XGBoost model: `fn(model_dir) -> model`."""
    function.is_init_handler = True  # type: ignore[attr-defined]
    return function


def __getattr__(name: str) -> Any:
    """Find the functions of LMI's parser in their module, which most models do not need."""
    parser = importlib.import_module("djl_python.request_parser")
    if name not in parser.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(parser, name)

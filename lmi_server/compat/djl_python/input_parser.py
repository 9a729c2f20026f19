"""Decorators for the functions of a `model.py` that replace parts of a built-in handler.

Of several functions with the same decorator, the first in the file counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


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

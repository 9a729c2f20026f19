"""The decorator for the function of a `model.py` that writes answers, and the types of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from djl_python.request_io import RequestInput, RequestOutput, Sequence, TextGenerationOutput, TextInput, Token

__all__ = [
    "RequestInput",
    "RequestOutput",
    "Sequence",
    "TextGenerationOutput",
    "TextInput",
    "Token",
    "output_formatter",
]

F = TypeVar("F", bound=Callable[..., Any])


def output_formatter(function: F) -> F:
    """Mark the function that writes answers: `fn(output: TextGenerationOutput) -> str`."""
    function.is_output_formatter = True  # type: ignore[attr-defined]
    return function

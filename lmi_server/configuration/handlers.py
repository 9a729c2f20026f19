"""The table of handlers: which `option.entryPoint` means which class. Adding an engine adds one row.

Rows are strings, so that an engine that is not installed costs nothing and the server process never imports one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from lmi_server.configuration.options import ModelOptions


@dataclass(frozen=True, slots=True)
class HandlerRow:
    """One handler: the names under which entryPoint asks for it, and "module:Class" of it and of its options.

    The module of `options` is importable without the engine. `causal_lm_only`: the handler generates text with a causal
    language model and serves no other architecture.
    """

    names: tuple[str, ...]
    handler: str
    options: str
    causal_lm_only: bool = False


_HUGGING_FACE = HandlerRow(
    names=("djl_python.huggingface", "huggingface"),
    handler="handlers.huggingface:HuggingFaceHandler",
    options="handlers.huggingface_options:HuggingFaceOptions",
    causal_lm_only=True,
)
_ECHO = HandlerRow(
    names=("djl_python.echo", "echo"),
    handler="handlers.echo:EchoHandler",
    options="handlers.echo:EchoOptions",
)

HANDLERS = (_HUGGING_FACE, _ECHO)
DEFAULT_HANDLER = _HUGGING_FACE


def find_handler(entry_point: str) -> HandlerRow | None:
    """Return the row that `entry_point` names."""
    return next((row for row in HANDLERS if entry_point in row.names), None)


def entry_points() -> tuple[str, ...]:
    """Return every name that entryPoint may have."""
    return tuple(name for row in HANDLERS for name in row.names)


def load_options_type(row: HandlerRow) -> type[ModelOptions]:
    """Import the options class of `row`."""
    return cast("type[ModelOptions]", load(row.options))


def options_type_of(handler: str) -> type[ModelOptions]:
    """Return the options class of the handler class "module:Class".

    A handler that is not in the table is imported and asked for its `options_type`.
    """
    for row in HANDLERS:
        if row.handler == handler:
            return load_options_type(row)
    return cast("type[ModelOptions]", getattr(load(handler), "options_type", ModelOptions))


def load(path: str) -> object:
    """Import "module:Class" and return the class."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)

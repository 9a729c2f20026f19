"""Who reads requests and writes answers: the dialects, or code in the directory of the model or of an adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lmi_server import dialects
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.handlers import load as load_by_name
from lmi_server.contract.errors import ModelLoadError, RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects.adapters import named_adapter
from lmi_server.dialects.base import Exchange, Formatting, ServedModel
from lmi_server.worker.handler_loading import Loading

Parse = Callable[[Input, ServedModel], Exchange]
"""Reads a request: `dialects.parse`, or the code of a model or an adapter in its place."""


class Formats:
    """Chooses by the adapter that a request names. Raises ModelLoadError where the model's code cannot be loaded."""

    def __init__(self, loading: Loading, tokenizer: Callable[[], Any]) -> None:
        self._options = loading.options
        self._tokenizer = tokenizer
        spec = HANDLERS.by_handler(loading.load.handler)
        formats_itself = spec is not None and spec.runs_user_code
        self._own = None if formats_itself else self._load(loading.model_dir, None)
        self._default: Parse = dialects.parse if self._own is None else self._own.parse
        self._of_adapters: dict[str, Parse] = {}

    def of(self, request: Input) -> Parse:
        """Return what reads `request`."""
        if not self._of_adapters:
            return self._default
        return self._of_adapters.get(named_adapter(request) or "", self._default)

    def _load(self, directory: str, base: Formatting | None) -> Formatting | None:
        """Load the code in `directory`; None where there is none. Raises ModelLoadError with file and line."""
        if not self._is_needed(directory):
            return None
        load_formatting = cast("Callable[..., Formatting | None]", load_by_name(HANDLERS.formatters))
        return load_formatting(directory, self._options, self._tokenizer, base)

    def of_adapter(self, directory: str) -> Formatting | None:
        """Load the code of an adapter; None where it has none. Raises RequestError with file and line."""
        if not Path(directory, "model.py").is_file():
            return None
        try:
            return self._load(directory, self._own)
        except ModelLoadError as error:
            raise RequestError(error.message) from error

    def set_adapter(self, name: str, formatting: Formatting | None) -> None:
        """Let requests that name an adapter be read by its own code, or again by that of the model."""
        if formatting is None:
            self._of_adapters.pop(name, None)
        else:
            self._of_adapters[name] = formatting.parse

    def _is_needed(self, directory: str) -> bool:
        options = self._options
        names_function = options.output_formatter not in (None, *dialects.FORMATTER_NAMES) or options.input_formatter
        return bool(names_function) or Path(directory, "model.py").is_file()

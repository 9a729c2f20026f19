"""Who reads requests and writes answers: the dialects, or code in the directory of the model or of an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec

from lmi_server import dialects
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.handlers import load as load_by_name
from lmi_server.contract.errors import ModelLoadError, RequestError
from lmi_server.contract.handler import LLMHandler
from lmi_server.contract.protocol import Adapter, Input
from lmi_server.dialects import fields
from lmi_server.dialects.adapters import requested_adapter, with_adapter
from lmi_server.dialects.base import Exchange, Formatting, ServedModel
from lmi_server.worker.handler_loading import Loading

_LONG_BODY = 256 * 1024  # bytes; to check one of many small members takes ten milliseconds or more


class FormattedAdapter(Adapter, frozen=True, kw_only=True):
    """An adapter that brings code of its own to read its requests and write their answers.

    The handler keeps it like any other adapter, so that its weights and its code come and go together.
    """

    formatting: Formatting


class Formats:
    """Parses requests with the formatter of the model or of the requested adapter, else with the dialects."""

    def __init__(self, loading: Loading, handler: LLMHandler) -> None:
        """Load the code of the model. Raises ModelLoadError with file and line if it cannot be loaded."""
        self._options = loading.options
        self._thread = ThreadPoolExecutor(1, "parser")
        self._handler = handler
        spec = HANDLERS.by_handler(loading.load.handler)
        formats_itself = spec is not None and spec.runs_user_code
        self._own = None if formats_itself else self._load(loading.model_dir, None)

    async def parse_any(self, request: Input, served: ServedModel) -> Exchange:
        """Parse a request as `parse` does, and a long one beside the event loop, where streams go on meanwhile.

        Code of the model or an adapter expects no second thread, so that it parses on the loop.
        """
        if len(request.body()) <= _LONG_BODY or self._own is not None or self._has_formatted_adapters():
            return self.parse(request, served)
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._thread, dialects.parse, request, served)

    def parse(self, request: Input, served: ServedModel) -> Exchange:
        """Parse a request. Raises RequestError if it cannot be served, HandlerError if the model's code raises."""
        adapter = self._formatted_adapter(request, served)
        if adapter is not None:
            # Its code may drop the field that names it; the weights are the adapter's all the same.
            return adapter.formatting.parse(with_adapter(request, adapter.name), served)
        return dialects.parse(request, served) if self._own is None else self._own.parse(request, served)

    def with_formatting(self, adapter: Adapter) -> Adapter:
        """Return `adapter` with the code that it brings, if it brings any. Raises RequestError with file and line."""
        if not Path(adapter.directory, "model.py").is_file():
            return adapter
        try:
            formatting = self._load(adapter.directory, self._own)
        except ModelLoadError as error:
            raise RequestError(error.message) from error
        if formatting is None:
            return adapter
        return FormattedAdapter(**msgspec.structs.asdict(adapter), formatting=formatting)

    def _has_formatted_adapters(self) -> bool:
        adapters = self._handler.adapters
        return bool(adapters) and any(isinstance(adapter, FormattedAdapter) for adapter in adapters.values())

    def _formatted_adapter(self, request: Input, served: ServedModel) -> FormattedAdapter | None:
        """Return the adapter that `request` asks for, if it brings code of its own."""
        # Most models have no such adapter, and then the body need not be read twice.
        if not self._has_formatted_adapters():
            return None
        try:
            name = requested_adapter(request, _json_body(request), served)
        except RequestError:  # a wrong type, which the parser of the request reports
            return None
        adapter = self._handler.adapters.get(name or "")
        return adapter if isinstance(adapter, FormattedAdapter) else None

    def _load(self, directory: str, base: Formatting | None) -> Formatting | None:
        """Load the code in `directory`; return None if it has none. Raises ModelLoadError with file and line."""
        options = self._options
        names_function = options.output_formatter not in (None, *dialects.FORMATTER_NAMES) or options.input_formatter
        if not names_function and not Path(directory, "model.py").is_file():
            return None
        load_formatting = cast("Callable[..., Formatting | None]", load_by_name(HANDLERS.formatters))
        tokenizer: Callable[[], Any] = self._handler.tokenizer
        return load_formatting(directory, options, tokenizer, base)


def _json_body(request: Input) -> dict[str, Any]:
    """Return the body, or {} if it is no JSON object: code of one's own may read anything."""
    try:
        return fields.json_object(request)
    except RequestError:
        return {}

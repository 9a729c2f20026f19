"""Serves the user's own code: a function in the contract of LMI's `djl_python`, or a handler of `lmi_server`'s own."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TypeAlias

from handlers.own_code.generate import ConcurrentDelegate, GenerateFunction
from handlers.own_code.options import OwnCodeOptions
from handlers.user_code import find_class, find_marked, load_entry_point
from lmi_server.contract.errors import LmiServerError, ModelLoadError
from lmi_server.contract.handler import AsyncRequestHandler, LLMHandler, ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import Adapter, Input
from lmi_server.machine.environment import extend_python_path

_Handler: TypeAlias = RequestHandler | AsyncRequestHandler | LLMHandler
_HANDLERS: tuple[type[_Handler], ...] = (RequestHandler, AsyncRequestHandler, LLMHandler)
_FORMATTERS = ("input_formatter", "output_formatter")


class OwnCodeHandler(RequestHandler):
    """Imports the entry point and leaves everything to the handler that it defines."""

    def __init__(self) -> None:
        self._code: RequestHandler

    def start(self, model_dir: str, options: OwnCodeOptions) -> ModelInfo:
        os.chdir(model_dir)  # LMI's workers run there, so user code opens its files by relative names
        sys.path.insert(0, model_dir)
        extend_python_path(model_dir)
        self._code = _code_of(load_entry_point(options.entry_point, model_dir), options)
        self._code.served_names = self.served_names
        return self._code.start(model_dir, options)

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        return self._code.handle(requests)

    def concurrent_handler(self) -> AsyncRequestHandler | LLMHandler | None:
        return self._code.concurrent_handler()

    def add_adapter(self, adapter: Adapter) -> str:
        return self._code.add_adapter(adapter)

    def remove_adapter(self, name: str) -> str:
        return self._code.remove_adapter(name)

    def stop(self) -> None:
        self._code.stop()


def _code_of(module: ModuleType, options: OwnCodeOptions) -> RequestHandler:
    """Return a handler for what `module` defines: a function of LMI's contract, a handler class, or `generate`.

    Raises ModelLoadError if it defines none of them.
    """
    function = getattr(module, options.handler, None)
    if callable(function):
        # Late, because they import djl_python.
        from handlers.own_code.djl_adapters import functions_in
        from handlers.own_code.djl_function import DjlFunction

        return DjlFunction(function, find_marked(module, _FORMATTERS), functions_in(module))
    handler = find_class(module, _HANDLERS)
    if handler is not None:
        made = handler()
        return made if isinstance(made, RequestHandler) else ConcurrentDelegate(made)
    generate = getattr(module, "generate", None)
    if inspect.isasyncgenfunction(generate):
        return ConcurrentDelegate(GenerateFunction(generate))
    raise ModelLoadError(
        f"{module.__file__}: defines no function {options.handler} (option.handler), no class derived from "
        f"{', '.join(cls.__name__ for cls in _HANDLERS)}, and no asynchronous generator generate; define one of them"
    )

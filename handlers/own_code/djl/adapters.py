"""Gives LoRA adapters to a model.py: calls its functions `register_adapter`, `update_adapter`, `unregister_adapter`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from djl_python.inputs import Input, make_input
from djl_python.outputs import Output

from handlers.own_code.djl.outputs import DEFAULT_MESSAGES, chunk_fields
from lmi_server.contract.errors import (
    BadParameterError,
    HandlerError,
    LmiServerError,
    ModelExistsError,
    ModelMemoryError,
    ModelNotFoundError,
    RequestError,
)
from lmi_server.contract.protocol import Adapter

_REGISTER, _UPDATE, _UNREGISTER = ("register_adapter", "update_adapter", "unregister_adapter")
_ERRORS: Mapping[int, type[LmiServerError]] = {
    400: BadParameterError,
    404: ModelNotFoundError,
    409: ModelExistsError,
    507: ModelMemoryError,
}


def functions_in(module: ModuleType) -> Mapping[str, Callable[[Input], Any]]:
    """Return the adapter functions that `module` defines, by name."""
    found = {name: getattr(module, name, None) for name in (_REGISTER, _UPDATE, _UNREGISTER)}
    return {name: function for name, function in found.items() if callable(function)}


class AdapterFunctions:
    """The adapter functions of the user's code, and the adapters that they have accepted.

    A function gets an adapter in LMI's form: the properties `name`, `alias` and `src` (a local directory), and every
    other parameter of the management call as content.
    """

    def __init__(self, functions: Mapping[str, Callable[[Input], Any]], common: Mapping[str, Any]) -> None:
        self._functions = functions
        self._common = common
        self.registered: dict[str, Adapter] = {}

    def add(self, adapter: Adapter) -> str:
        """Register or update an adapter; return the message of the user's function, "" if it has none.

        Raises RequestError if the code has no such function, an LmiServerError if the function refuses the adapter, and
        whatever the function raises.
        """
        return self._accept(adapter, self._put(adapter))

    async def add_awaited(self, adapter: Adapter) -> str:
        """As `add`, also for an asynchronous function."""
        return self._accept(adapter, await await_result(self._put(adapter)))

    def remove(self, name: str) -> str:
        """Unregister an adapter; return and raise what `add` does."""
        return self._drop(name, self._call(_UNREGISTER, self.registered[name]))

    async def remove_awaited(self, name: str) -> str:
        """As `remove`, also for an asynchronous function."""
        return self._drop(name, await await_result(self._call(_UNREGISTER, self.registered[name])))

    def _accept(self, adapter: Adapter, output: Any) -> str:
        message = _message(output)
        self.registered[adapter.name] = adapter
        return message

    def _drop(self, name: str, output: Any) -> str:
        message = _message(output)
        del self.registered[name]
        return message

    def _put(self, adapter: Adapter) -> Any:
        return self._call(_UPDATE if adapter.name in self.registered else _REGISTER, adapter)

    def _call(self, name: str, adapter: Adapter) -> Any:
        function = self._functions.get(name)
        if function is None:
            raise RequestError(f"model.py defines no function {name}; define it to serve adapters of its own")
        described = {"name": adapter.name, "alias": adapter.alias or adapter.name, "src": adapter.directory}
        content = [(key, value.encode()) for key, value in _options(adapter).items()]
        return function(make_input({**self._common, **described, "handler": name}, content, name))


def _options(adapter: Adapter) -> Mapping[str, str]:
    preload = {} if adapter.preload else {"preload": "false"}
    pin = {"pin": "true"} if adapter.pin else {}
    return {**adapter.options, **preload, **pin}


async def await_result(result: Any) -> Any:
    """Return the result of a function of the user; await it first if it has to be."""
    # An asynchronous iterator is a stream. Attributes are looked up faster than abstract classes.
    return await result if hasattr(result, "__await__") and not hasattr(result, "__anext__") else result


def _message(output: Any) -> str:
    """Return the message of the Output that an adapter function returned; "" if the function did not set one.

    Raises HandlerError for anything but an Output, and for one of status 300 or more the error of that status.
    """
    if output is None:
        return ""
    if not isinstance(output, Output):
        raise HandlerError(f"Invalid output type: {type(output)}")
    if output.code >= 300:
        raise _ERRORS.get(output.code, RequestError)(_reason(output))
    fields = chunk_fields(output)  # LMI's asynchronous services answer in the form of a piece
    if fields is not None and "error" in fields:
        raise _ERRORS.get(int(fields.get("code", 0)), RequestError)(fields["error"])
    if fields is not None:
        return fields["data"]
    return "" if output.message in DEFAULT_MESSAGES else output.message


def _reason(output: Output) -> str:
    body = b"".join(map(bytes, output.content.values)).decode(errors="replace")
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        error = body
    return f"{output.message}: {error}" if error else output.message

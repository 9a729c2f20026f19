"""A base class for handlers that keep LoRA adapters, each with its own formatters in a model.py."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from djl_python.adapter_manager_mixin import AdapterManagerMixin, has_code
from djl_python.custom_formatter_handling import CustomFormatterError, CustomFormatterHandler
from djl_python.inputs import Input
from djl_python.outputs import Output


class AdapterFormatterMixin(CustomFormatterHandler, AdapterManagerMixin):
    """The formatters of an adapter, by its name in `adapter_code_registry`, come before the model's."""

    def __init__(self) -> None:
        CustomFormatterHandler.__init__(self)
        AdapterManagerMixin.__init__(self)
        self.adapter_code_registry: dict[str, CustomFormatterHandler] = {}

    def get_adapter_formatter_handler(self, adapter_name: str) -> CustomFormatterHandler | None:
        """Return the formatters of an adapter; None if it has none."""
        return self.adapter_code_registry.get(adapter_name)

    def apply_input_formatter(self, decoded_payload: Any, adapter_name: str | None = None, **kwargs: Any) -> Any:
        own = self._own(adapter_name)
        if own is not None and own.input_formatter is not None:
            return own.apply_input_formatter(decoded_payload, **kwargs)
        return super().apply_input_formatter(decoded_payload, **kwargs)

    def apply_output_formatter(self, output: Any, adapter_name: str | None = None, **kwargs: Any) -> Any:
        own = self._own(adapter_name)
        if own is not None and own.output_formatter is not None:
            return own.apply_output_formatter(output, **kwargs)
        return super().apply_output_formatter(output, **kwargs)

    async def apply_output_formatter_streaming_raw(  # type: ignore[override]
        self, response: AsyncIterator[Any], adapter_name: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        async for item in response:
            yield self.apply_output_formatter(item, adapter_name)

    def load_adapter_custom_code(self, adapter_name: str, adapter_path: str) -> CustomFormatterHandler:
        """Load the model.py of an adapter. Raises FileNotFoundError without one, ValueError if it cannot be used."""
        path = os.path.join(adapter_path, "model.py")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"adapter {adapter_name}: there is no file {path}")
        loaded = CustomFormatterHandler()
        try:
            loaded.load_formatters(adapter_path, adapter_name)
        except CustomFormatterError as error:
            raise ValueError(f"adapter {adapter_name}: {error}: {error.original_exception}") from error
        self.adapter_code_registry[adapter_name] = loaded
        return loaded

    def unload_adapter_custom_code(self, adapter_name: str) -> bool:
        """Forget the formatters of an adapter; return whether there were any."""
        return self.adapter_code_registry.pop(adapter_name, None) is not None

    async def register_adapter(self, inputs: Input) -> Output:
        """Load the code of an adapter, then register it; without its code it is not registered."""
        name, path = inputs.get_property("name"), inputs.get_property("src") or ""
        if has_code(path) == "true":
            try:
                self.load_adapter_custom_code(name, path)
            except ValueError as error:
                told = {"data": "", "last": True, "code": 424, "error": str(error)}
                return Output().add(Output.binary_encode(told), key="data")
        return await super().register_adapter(inputs)

    async def unregister_adapter(self, inputs: Input) -> Output:
        answer = await super().unregister_adapter(inputs)
        self.unload_adapter_custom_code(inputs.get_property("name"))
        return answer

    def _own(self, adapter_name: str | None) -> CustomFormatterHandler | None:
        return None if adapter_name is None else self.get_adapter_formatter_handler(adapter_name)

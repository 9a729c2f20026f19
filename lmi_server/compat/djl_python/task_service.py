"""The base of the services of Hugging Face models. Not LMI's module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djl_python.built_in_service import BuiltInService


class TaskService(BuiltInService):
    """Answers whole requests, alone or in static batches, with any task of a Hugging Face model."""

    attributes = ("model", "model_config", "tokenizer")

    def initialize(self, properties: Mapping[str, Any]) -> None:
        for name in ("input_formatter", "output_formatter"):
            function = properties.get(name)
            if callable(function):
                raise ValueError(
                    f"the property {name} is the function {getattr(function, '__name__', function)}. In a model.py"
                    f" {type(self).__name__} answers whole requests and calls no formatters; call it from handle(), or"
                    f" mark it with @{name}, leave handle() out and set option.entryPoint={self.entry_point}"
                )
        super().initialize(properties)
        task = self._handler.task  # type: ignore[union-attr]  # a TaskHandler's
        self.model, self.tokenizer = task.model, task.tokenizer
        self.model_config = getattr(task.model, "config", None)

    def batching_remedy(self) -> str:
        return (
            f", or option.entryPoint={self.entry_point}, with which handle() of model.py gets each request first and"
            " the built-in handler those for which it returns None"
        )

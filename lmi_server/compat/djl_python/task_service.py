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
            if callable(properties.get(name)):
                raise ValueError(
                    f"model.py marks a function with @{name}, which {type(self).__name__} does not call; call it from"
                    f" handle(), or leave handle() out and set option.entryPoint={self.entry_point}"
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

"""The base of the services of scikit-learn and XGBoost models. Not LMI's module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djl_python.built_in_service import BuiltInService


class TabularService(BuiltInService):
    """Predicts a value per row. The decorated functions of a model.py replace parts, as with `option.entryPoint`."""

    attributes = ("model",)
    not_called = frozenset(
        {"_get_trusted_types", "apply_init_handler", "apply_input_formatter", "apply_output_formatter"}
        | {"apply_output_formatter_streaming_raw", "apply_prediction_handler", "init_handler", "input_formatter"}
        | {"is_sagemaker_script", "load_formatters", "output_formatter", "prediction_handler"}
    )

    def initialize(self, properties: Mapping[str, Any]) -> None:
        super().initialize(properties)
        self.model = self._handler.model  # type: ignore[union-attr]  # a TabularHandler's

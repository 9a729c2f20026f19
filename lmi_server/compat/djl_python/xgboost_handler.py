"""The service of XGBoost models, for code that calls or subclasses it; it runs on this server's handler."""

from __future__ import annotations

from djl_python.built_in_service import handle_with
from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.tabular_service import TabularService


class XGBoostHandler(TabularService):
    entry_point = "djl_python.xgboost_handler"


service = XGBoostHandler()


def handle(inputs: Input) -> Output | None:
    return handle_with(service, inputs)

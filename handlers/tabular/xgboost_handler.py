"""The xgboost handler: one model file of XGBoost, JSON or UBJSON by default."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from handlers.tabular.handler import TabularHandler
from handlers.tabular.options import XgboostOptions
from lmi_server.contract.errors import needs_extra


class XgboostHandler(TabularHandler):
    """Serves a Booster; a pickle may also contain a model of XGBoost's scikit-learn interface."""

    formats = MappingProxyType(
        {"json": (".json",), "ubj": (".ubj",), "xgb": (".xgb", ".bst"), "pickle": (".pkl", ".pickle")}
    )
    safe = frozenset({"json", "ubj"})

    def load(self, path: Path, model_format: str, options: XgboostOptions) -> Any:
        with needs_extra("the xgboost handler needs", "xgboost"):
            import xgboost
        if model_format == "pickle":
            import pickle

            with path.open("rb") as file:
                return pickle.load(file)  # only with option.trust_insecure_model_files  # nosec B301
        booster = xgboost.Booster()
        booster.load_model(path)
        return booster

    def predict(self, model: Any, rows: Any) -> Any:
        import xgboost

        if not isinstance(model, xgboost.Booster):
            return model.predict(rows)
        return model.predict(xgboost.DMatrix(rows, feature_names=model.feature_names))

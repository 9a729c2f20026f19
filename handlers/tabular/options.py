"""The options of the sklearn and xgboost handlers; importable without either library."""

from __future__ import annotations

from typing import Annotated, Literal

from lmi_server.configuration.declaration import NoEffect
from lmi_server.configuration.options import ModelOptions, Names
from lmi_server.configuration.references import FOR_OPERATOR


class TreeModelOptions(ModelOptions):
    """Keys of serving.properties for a model that predicts a value per row."""

    rolling_batch: Literal["disable", "auto"] = "disable"
    """There are no tokens to batch by."""
    trust_insecure_model_files: bool = False
    """Load files that can run code (pickle and similar formats)."""
    async_mode: Annotated[bool, NoEffect("requests run together as a dynamic batch (batch_size)")] = False
    """Answer in the shape of LMI's asynchronous service."""
    default_accept: Literal["application/json", "text/csv"] = "application/json"
    """Content type of an answer if the request accepts any."""


class SklearnOptions(TreeModelOptions):
    """Keys of serving.properties for a model of scikit-learn."""

    model_format: Literal["skops", "joblib", "pickle", "cloudpickle"] | None = None
    """Format of the model's file; if not set, the ending of the file's name decides."""
    skops_trusted_types: Annotated[Names, FOR_OPERATOR] = ()
    """Further types that a skops file may contain; skops trusts some by itself."""


class XgboostOptions(TreeModelOptions):
    """Keys of serving.properties for a model of XGBoost."""

    model_format: Literal["json", "ubj", "pickle", "xgb"] | None = None
    """Format of the model's file; if not set, the ending of the file's name decides."""

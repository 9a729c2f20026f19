"""Which optional packages are installed. A module is imported at its first use."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

_MODULES = {"joblib": "joblib", "cloudpickle": "cloudpickle", "skops_io": "skops.io", "xgboost": "xgboost"}


def is_joblib_available() -> bool:
    return find_spec("joblib") is not None


def is_cloudpickle_available() -> bool:
    return find_spec("cloudpickle") is not None


def is_skops_available() -> bool:
    return find_spec("skops") is not None


def is_xgboost_available() -> bool:
    return find_spec("xgboost") is not None


def __getattr__(name: str) -> Any:
    """Return the module of that name; None if it is not installed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    return importlib.import_module(module) if find_spec(module.partition(".")[0]) is not None else None

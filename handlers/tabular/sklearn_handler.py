"""The sklearn handler: one model file of scikit-learn, skops by default."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from handlers.tabular.handler import TabularHandler
from handlers.tabular.options import SklearnOptions
from lmi_server.contract.errors import ModelLoadError, needs_extra


class SklearnHandler(TabularHandler):
    """Serves any object with a method `predict`."""

    formats = MappingProxyType(
        {"skops": (".skops",), "joblib": (".joblib",), "pickle": (".pkl", ".pickle"), "cloudpickle": (".cloudpkl",)}
    )
    safe = frozenset({"skops"})

    def load(self, path: Path, model_format: str, options: SklearnOptions) -> Any:
        with needs_extra("the sklearn handler needs", "sklearn"):
            if model_format == "skops":
                return _load_skops(path, options)
            if model_format == "joblib":
                import joblib

                return joblib.load(path)
            import sklearn  # noqa: F401 - the pickle needs it; imported here, its absence has a remedy
        import pickle

        with path.open("rb") as file:
            return pickle.load(file)  # of cloudpickle, too; only with option.trust_insecure_model_files  # nosec B301

    def predict(self, model: Any, rows: Any) -> Any:
        return model.predict(rows)


def _load_skops(path: Path, options: SklearnOptions) -> Any:
    import skops.io

    unknown = sorted(set(skops.io.get_untrusted_types(file=path)) - set(options.skops_trusted_types))
    if unknown:
        raise ModelLoadError(
            f"{path}: contains types that skops does not trust: {', '.join(unknown)}; add the ones you trust to "
            "option.skops_trusted_types"
        )
    return skops.io.load(path, trusted=list(options.skops_trusted_types))

"""What a process does around the import of the libraries that load a model, which takes most of a worker's start.

Without it, `import transformers` takes a third longer, and vLLM's imports a quarter.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# The libraries make about two million objects that stay to the end. The usual thresholds (700, 10, 10) have the garbage
# collector walk all of them dozens of times. It is not switched off, since loading a large model leaves garbage too.
_WHILE_LOADING = (100_000, 50, 1000)
_SERVING = gc.get_threshold()


def prepare() -> None:
    """Make the imports that follow cheap. Call it first thing in a process that will load a model."""
    gc.set_threshold(*_WHILE_LOADING)
    sys.meta_path.insert(0, _CandidateGeneratorFinder())


def loaded() -> None:
    """Have the garbage collector work as usual, but for all that exists by now: it stays until the end.

    Without the freeze, every full collection would walk all objects of the libraries, and all streams would stop for
    that long.
    """
    if gc.get_threshold() == _WHILE_LOADING:  # else the model's own code has chosen
        gc.set_threshold(*_SERVING)
    gc.collect()
    gc.freeze()


class _CandidateGeneratorFinder(MetaPathFinder):
    """Finds the one module of transformers that imports scikit-learn, and has it do so when it needs it.

    With scikit-learn come scipy and pandas, a second of processor time in all, for one function (`roc_curve`) of
    speculative decoding with an assistant model.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers.generation.candidate_generator":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _WithoutSklearn(fullname, spec.loader.path)
        return spec


class _WithoutSklearn(SourceFileLoader):
    """Executes a module that imports `roc_curve` of scikit-learn if `is_sklearn_available` says so."""

    def exec_module(self, module: ModuleType) -> None:
        utils: Any = importlib.import_module("transformers.utils")
        is_available = utils.is_sklearn_available
        utils.is_sklearn_available = lambda: False
        try:
            super().exec_module(module)
        finally:
            utils.is_sklearn_available = is_available
        vars(module).update(is_sklearn_available=is_available, roc_curve=_roc_curve)


def _roc_curve(*arguments: Any, **more: Any) -> Any:
    return importlib.import_module("sklearn.metrics").roc_curve(*arguments, **more)

"""The import of the libraries that load a model, which takes most of a worker's start.

Without it, `import transformers` takes a third longer, and vLLM's imports a quarter.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import functools
import gc
import importlib
import importlib.metadata
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import Distribution
from types import ModuleType
from typing import Any, NamedTuple

from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import shown_gpus

# The libraries make about two million objects that stay to the end. The usual thresholds (700, 10, 10) have the garbage
# collector walk all of them dozens of times. It is not switched off, since loading a large model leaves garbage too.
_WHILE_LOADING = (100_000, 50, 1000)
# The youngest objects are collected as in Python 3.13. With 700, 64 requests that come together had collections that
# found nothing, which were 6 % of the instructions of a worker with the echo handler (callgrind).
_SERVING = (2_000, 10, 10)
_NAME = re.compile(r"^Name: *(\S+)", re.MULTILINE)


def prepare() -> None:
    """Make the imports that follow cheap. Call it first thing in a process that will load a model."""
    gc.set_threshold(*_WHILE_LOADING)
    prepare_spawned()


def prepare_spawned() -> None:
    """Make the imports of a process cheaper that an engine spawns: the garbage collector stays as the engine has it."""
    sys.meta_path.insert(0, _LateImportFinder())


def freeze_libraries() -> None:
    """Keep the libraries out of the garbage collections of a load, if all of them are imported before it.

    vLLM has the collector walk all objects up to eight times while it loads a model, which takes half a second each
    time. The imports leave hardly any garbage, so none has to be collected before.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind would report what is never collected as leaks, a hundred lines of log


def finish_loading() -> None:
    """Have the garbage collector work at `_SERVING`, but for all that exists by now: it stays until the end.

    Without the freeze, every full collection would walk all objects of the libraries, and all streams would stop for
    that long.
    """
    if gc.get_threshold() == _WHILE_LOADING:  # else the model's own code has chosen
        gc.set_threshold(*_SERVING)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def hide(library: str) -> Iterator[None]:
    """Have imports of `library` fail meanwhile, as if it were not installed, unless it is imported already."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]  # which is how Python marks a module that must not be found
    try:
        yield
    finally:
        del sys.modules[library]


def hide_triton() -> AbstractContextManager[None]:
    """Return a context in which imports do not find Triton (for GPUs) if this process has no GPU.

    PyTorch imports it wherever it is installed. That takes 0.2 s, and at the end of the process Triton reports all its
    objects as leaks, a hundred lines of log.
    """
    _, gpus = shown_gpus(process_environment())
    return contextlib.nullcontext() if gpus else hide("triton")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import libraries here without garbage collections, and without Triton as `hide_triton` says.

    What they make stays out of all later collections. transformers' imports leave 9000 objects of garbage, less than 1
    MB. Six collections during them, and the one of `finish_loading` over all that they made, took 0.4 s of a start.
    """
    imported, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        with hide_triton():
            yield
    finally:
        if len(sys.modules) > imported:  # a second load has garbage of the first
            gc.freeze()
        if was_enabled:
            gc.enable()


class _Late(NamedTuple):
    """A function that a module of transformers imports with a large library, and calls in rare cases only."""

    library: str
    function: str
    available: str
    """The function of transformers.utils that the module asks before it imports the library."""


# With scikit-learn come scipy and pandas: a second of processor time in all.
_SPECULATIVE_DECODING = _Late("sklearn.metrics", "roc_curve", "is_sklearn_available")
_LOSS_OF_DETECTION = _Late("scipy.optimize", "linear_sum_assignment", "is_scipy_available")  # for training
_LATE = {
    "transformers.generation.candidate_generator": _SPECULATIVE_DECODING,
    "transformers.loss.loss_deformable_detr": _LOSS_OF_DETECTION,
    "transformers.loss.loss_for_object_detection": _LOSS_OF_DETECTION,
    "transformers.loss.loss_grounding_dino": _LOSS_OF_DETECTION,
    "transformers.loss.loss_lw_detr": _LOSS_OF_DETECTION,
    "transformers.loss.loss_rf_detr": _LOSS_OF_DETECTION,
    "transformers.loss.loss_rt_detr": _LOSS_OF_DETECTION,
}
# Modules that do without a library if it is not installed, the library, and its name in the module. The first resamples
# audio; with it comes scipy.stats: more than half a second of processor time. The second tunes training; with it come
# scikit-learn and pandas: a fifth of what a rank imports. The third asks a user about SageMaker; transformers imports
# it, and boto3 takes 0.1 s.
_OPTIONAL = {
    "vllm.multimodal.audio": ("scipy.signal", "scipy_signal"),
    "deepspeed.autotuning.tuner.cost_model": ("xgboost", "xgb"),
    "accelerate.commands.config.sagemaker": ("boto3", "boto3"),
}
# It reads all installed packages and all files of its models.
_SCANNING = "transformers.utils.import_utils"
# It has torch compile functions that few models use. peft, which reads adapters, imports it wherever it is installed.
_COMPILING = "bitsandbytes.backends.default.ops"


class _LateImportFinder(MetaPathFinder):
    """Finds modules that import a library, or ask for a compiler, only when they use it, and `_SCANNING`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _LATE:
            loader: type[SourceFileLoader] = _LateImportLoader
        elif fullname in _OPTIONAL:
            loader = _OptionalImportLoader
        elif fullname == _SCANNING:
            loader = ScanningLoader
        elif fullname == _COMPILING:
            loader = _LateCompilerLoader
        else:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = loader(fullname, spec.loader.path)
        return spec


class _LateImportLoader(SourceFileLoader):
    """Executes a module as if its library were not installed, and then puts in what it did not import."""

    def exec_module(self, module: ModuleType) -> None:
        late = _LATE[module.__name__]
        utils = importlib.import_module("transformers.utils")
        # Of the module that defines it: in transformers.utils it may be replaced, as these modules import each other.
        is_available = getattr(importlib.import_module("transformers.utils.import_utils"), late.available)
        setattr(utils, late.available, lambda: False)
        try:
            super().exec_module(module)
        finally:
            setattr(utils, late.available, is_available)

        def function(*arguments: Any, **more: Any) -> Any:
            return getattr(importlib.import_module(late.library), late.function)(*arguments, **more)

        vars(module).update({late.available: is_available, late.function: function})


class _OptionalImportLoader(SourceFileLoader):
    """Executes a module as if its library were not installed, and then puts in one that is imported when it is used."""

    def exec_module(self, module: ModuleType) -> None:
        library, name = _OPTIONAL[module.__name__]
        with hide(library):
            super().exec_module(module)
        setattr(module, name, _LateLibrary(library))


class _LateLibrary:
    """Stands for a library, and imports it when an attribute of it is used."""

    def __init__(self, library: str) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._library), name)


class _LateCompilerLoader(SourceFileLoader):
    """Executes a module whose functions are to be compiled, and has torch prepare that at the first call of each.

    torch would import its compiler for it: 0.8 s of processor time, of the 1.0 s that the import of peft takes.
    """

    def exec_module(self, module: ModuleType) -> None:
        torch = vars(importlib.import_module("torch"))
        usual = torch["compile"]

        def compile_late(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
            if function is None:
                return functools.partial(compile_late, **options)
            compiled = functools.cache(lambda: usual(function, **options))
            return lambda *arguments, **more: compiled()(*arguments, **more)

        torch["compile"] = compile_late
        try:
            super().exec_module(module)
        finally:
            torch["compile"] = usual


class ScanningLoader(SourceFileLoader):
    """Executes transformers.utils.import_utils, and has its functions read each file once.

    That saves about 0.8 s of processor time, and the results are the same. A version of transformers without these
    functions is imported as it is.
    """

    def exec_module(self, module: ModuleType) -> None:
        usual = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = packages_distributions
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = usual
        # The cache of transformers has room for 128 directories. There are more, and each is scanned twice.
        scan = getattr(getattr(module, "create_import_structure_from_path", None), "__wrapped__", None)
        if scan is not None:
            vars(module)["create_import_structure_from_path"] = functools.cache(scan)
        # It looks for the last line that begins with __all__, in a list of all lines.
        exported = getattr(module, "fetch__all__", None)
        if exported is not None:
            vars(module)["fetch__all__"] = lambda content: exported(content[content.rfind("\n__all__") + 1 :])


def packages_distributions() -> dict[str, list[str]]:
    """Return what the function of this name in importlib.metadata does, without an object for each installed file."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        for package in declared or _top_level(distribution):
            found[package].append(_name(distribution))
    return dict(found)


def _top_level(distribution: Distribution) -> set[str]:
    record = distribution.read_text("RECORD")
    if record is None:
        files = [str(file) for file in distribution.files or ()]
    else:
        files = [row[0] for row in csv.reader(record.splitlines()) if row]
    return {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}


def _name(distribution: Distribution) -> str:
    found = _NAME.search(distribution.read_text("METADATA") or "")
    return distribution.metadata["Name"] if found is None else found[1]

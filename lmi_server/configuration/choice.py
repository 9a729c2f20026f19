"""Which handler a configuration means: engine aliases, entryPoint in all its spellings, option.rolling_batch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from lmi_server.artifacts.location import refuse_remote_entry_point
from lmi_server.configuration.check import told
from lmi_server.configuration.handlers import (
    DEEPSPEED,
    DEEPSPEED_TASK,
    DEFAULT_HANDLER,
    JAVA_ENGINE,
    OWN_CODE,
    PIPELINE,
    SKLEARN,
    VLLM,
    VLLM_POOLING,
    HandlerRow,
    entry_points,
    find_handler,
    handler_of_rolling_batch,
    served_entry_points,
)
from lmi_server.configuration.layers import Given, Source
from lmi_server.configuration.model_code import takes_requests
from lmi_server.configuration.recommender import batches_statically, is_true, recommend_rolling_batch
from lmi_server.configuration.tasks import POOLING, TEXT_GENERATION
from lmi_server.machine.inventory import Machine

ENTRY_POINT = "option.entryPoint"
HANDLER = "option.handler"
ROLLING_BATCH = "option.rolling_batch"
MPI_MODE = "option.mpi_mode"

_ALIASES: Mapping[str, Mapping[str, str]] = {
    "DeepSpeed": {MPI_MODE: "true", ENTRY_POINT: "djl_python.deepspeed"},
    "MPI": {MPI_MODE: "true", ENTRY_POINT: "djl_python.huggingface"},
}
_JAVA_ENGINES = ("PyTorch", "OnnxRuntime", "TensorFlow", "XGBoost", "LightGBM", "TritonServer", "Rust")
_SKLEARN_FILES = ("skops", "joblib", "pkl", "pickle", "cloudpkl")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Choice:
    """The handler, and what decided it: `key` and `source`, or no key where nothing but the defaults did.

    `problem` is a line where the entry point names nothing.
    """

    row: HandlerRow | None
    key: str | None = None
    source: Source | None = None
    problem: str | None = None

    def missing(self, model_dir: Path) -> str | None:
        """Return why this version cannot serve with the handler; None where it can."""
        if self.row is None or self.row.handler is not None:
            return None
        place = f"{model_dir / 'model.py'}:"
        if self.source is not None and self.key is not None:
            place = told(self.source, self.key)
        served = " or ".join(served_entry_points())
        return f"{place} is not available in this version; missing: {self.row.title}; served are {served}"


def engine_alias(given: Given) -> Given:
    """Return what the engine stands for, engine=MPI for example."""
    source = given.get("engine")
    if source is None:
        return {}
    visible = replace(source, layer="engine alias", spelling="engine", written=source.raw)
    return {key: replace(visible, raw=raw) for key, raw in _ALIASES.get(source.raw, {}).items()}


def choose_handler(given: Given, model_dir: Path, names: tuple[str, ...], task: str | None, machine: Machine) -> Choice:
    """Choose the handler for a model with architectures `names` (none: unknown) and `task` (None: unknown)."""
    engine, entry_point = given.get("engine"), given.get(ENTRY_POINT)
    if engine is not None and engine.raw in _JAVA_ENGINES:
        return Choice(JAVA_ENGINE, "engine", engine)
    if entry_point is None and _is_handler_file(model_dir, given):
        return Choice(OWN_CODE)
    if entry_point is None and any((model_dir / f"model.{ending}").is_file() for ending in _SKLEARN_FILES):
        return Choice(SKLEARN)
    chosen = Choice(DEFAULT_HANDLER) if entry_point is None else _by_entry_point(given, entry_point, model_dir)
    if chosen.row is DEEPSPEED and not _decodes(given, task):
        return replace(chosen, row=DEEPSPEED_TASK)
    if chosen.row is DEFAULT_HANDLER:
        if _runs_as_pipeline(given, task):
            return replace(chosen, row=PIPELINE)
        chosen = _by_rolling_batch(chosen, given, names, machine)
    return replace(chosen, row=VLLM_POOLING) if chosen.row is VLLM and task in POOLING else chosen


def _decodes(given: Given, task: str | None) -> bool:
    """Tell whether deepspeed means a rolling batch, which LMI has only where it is asked for."""
    rolling = given.get(ROLLING_BATCH)
    asked = "disable" if rolling is None else rolling.raw.lower()
    if asked != "auto":
        return asked != "disable"
    return task in (None, TEXT_GENERATION) and not batches_statically(given)


def _runs_as_pipeline(given: Given, task: str | None) -> bool:
    """Tell whether huggingface means whole tasks: of models that do not decode, and of static batches."""
    rolling = given.get(ROLLING_BATCH)
    asked = "auto" if rolling is None else rolling.raw.lower()
    if asked not in ("auto", "disable") or (MPI_MODE in given and is_true(given[MPI_MODE].raw)):
        return False
    return task not in (None, TEXT_GENERATION) or asked == "disable" or batches_statically(given)


def _is_handler_file(model_dir: Path, given: Given) -> bool:
    """Tell whether there is a model.py that is the handler; it may also only bring formatters for the built-in one.

    That is so where there is a model for the built-in one, and no function in model.py that takes requests.
    """
    path = model_dir / "model.py"
    if not path.is_file():
        return False
    files = ("config.json", *(f"model.{ending}" for ending in _SKLEARN_FILES))
    has_model = "option.model_id" in given or any((model_dir / name).is_file() for name in files)
    return HANDLER in given or not has_model or takes_requests(path)


def _by_entry_point(given: Given, source: Source, model_dir: Path) -> Choice:
    key, name = ENTRY_POINT, source.raw
    try:
        refuse_remote_entry_point(name)
    except ValueError as error:
        return Choice(None, key, source, f"{told(source, key)} {error}")
    row = find_handler(name) or (OWN_CODE if _is_own_code(name, model_dir) else None)
    if row is not None:
        return Choice(row, key, source)
    if name.endswith(".py"):
        return Choice(None, key, source, f"{told(source, key)} is not allowed; there is no file {model_dir / name}")
    nearest = difflib.get_close_matches(name, entry_points(), n=1, cutoff=0.7)
    advice = f"; did you mean {nearest[0]}?" if nearest else ""
    allowed = f"{', '.join(entry_points())}, a Python file of the model directory, an absolute path, a dotted module"
    return Choice(None, key, source, f"{told(source, key)} is not allowed; allowed: {allowed}{advice}")


def _is_own_code(name: str, model_dir: Path) -> bool:
    if name.endswith(".py"):
        return (model_dir / name).is_file()  # an absolute name replaces model_dir
    if _MODULE.fullmatch(name) is None or name.startswith("djl_python."):
        return False
    package = name.partition(".")[0]
    in_model = (model_dir / package).is_dir() or (model_dir / f"{package}.py").is_file()
    return in_model or find_spec(package) is not None


def _by_rolling_batch(chosen: Choice, given: Given, names: tuple[str, ...], machine: Machine) -> Choice:
    """Tell which handler huggingface, LMI's name for several, means here."""
    rolling, mpi = given.get(ROLLING_BATCH), given.get(MPI_MODE)
    if rolling is not None and rolling.raw.lower() != "auto":
        row = handler_of_rolling_batch(rolling.raw.lower())
        return chosen if row in (None, chosen.row) else Choice(row, ROLLING_BATCH, rolling)
    under_mpi = mpi is not None and is_true(mpi.raw)
    if chosen.source is not None and rolling is None and not under_mpi:
        return chosen
    row = handler_of_rolling_batch(recommend_rolling_batch(names, under_mpi, machine))
    if row is chosen.row or row is None:
        return chosen
    if mpi is not None and under_mpi:
        return Choice(row, MPI_MODE, mpi)
    return Choice(row, ROLLING_BATCH, rolling) if rolling is not None else Choice(row)

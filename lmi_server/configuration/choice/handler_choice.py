"""Chooses the handler of a model by engine, entry point, files, task and option.rolling_batch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lmi_server.artifacts.location import refuse_remote_entry_point
from lmi_server.configuration.choice.recommender import batches_statically, recommend_rolling_batch
from lmi_server.configuration.handlers import HandlerSpec, HandlerTable
from lmi_server.configuration.layers import Given, Source
from lmi_server.configuration.model_directory.checkpoint import READS_MORE, is_causal_lm
from lmi_server.configuration.model_directory.model_code import MODEL_CODE, takes_requests
from lmi_server.configuration.tasks import Workload
from lmi_server.machine.inventory import Machine

ENTRY_POINT = "option.entryPoint"
HANDLER = "option.handler"
ROLLING_BATCH = "option.rolling_batch"
MPI_MODE = "option.mpi_mode"
MAX_MODEL_LEN = "option.max_model_len"

# What LMI makes of these engines. Both run Python code, one process per device.
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "DeepSpeed": {MPI_MODE: "true", ENTRY_POINT: "djl_python.deepspeed"},
    "MPI": {MPI_MODE: "true", ENTRY_POINT: "djl_python.huggingface"},
}
_ALIAS: Final = "engine alias"  # the layer of what an engine stands for
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Choice:
    """The handler, and the `key` and `source` that decided it; no key if nobody named a handler.

    If the entry point names no handler, `spec` is None and `problem` says why. `note` is a warning about the choice.
    """

    spec: HandlerSpec | None
    key: str | None = None
    source: Source | None = None
    problem: str | None = None
    note: str | None = None

    def reason(self, model: Model, handlers: HandlerTable) -> str:
        """Return what chose the handler: a key with its place, a file of the model, or what is known of the model."""
        if self.source is not None and self.key is not None:
            return self.source.describe(self.key)
        if self.spec is handlers.user_code:
            return f"{MODEL_CODE} takes the requests"
        if self.spec is _by_files(model, handlers):
            return "the model directory holds a file of its kind"
        suits = ", ".join(model.architectures) or model.task or "a model of which nothing is known"
        return f"no key names one, and it suits {suits} on this machine"

    def missing(self, model_dir: Path, handlers: HandlerTable) -> str | None:
        """Return why this version cannot serve with the handler; None if it can."""
        if self.spec is None or self.spec.handler is not None:
            return None
        place = f"{model_dir / 'model.py'}:"
        if self.source is not None and self.key is not None:
            place = self.source.describe(self.key)
        served = " or ".join(handlers.served_entry_points())
        return f"{place} is not available in this version; missing: {self.spec.title}; served are {served}"


def engine_alias(engine: Source | None, own_code: bool = False) -> Given:
    """Return the values that an engine stands for, engine=MPI for example; with `own_code` all but the entry point."""
    if engine is None:
        return {}
    visible = replace(engine, layer=_ALIAS, spelling="engine", written=engine.raw)
    values = _ALIASES.get(engine.raw, {})
    return {key: replace(visible, raw=raw) for key, raw in values.items() if not (own_code and key == ENTRY_POINT)}


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model itself; `architectures` is empty and `task` is None if they are unknown.

    `weights` is the directory of the weights, None if they are not on this machine; `config` is the config.json there.
    """

    directory: Path
    architectures: tuple[str, ...]
    task: str | None
    in_gguf: bool = False
    weights: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def choose_handler(given: Given, model: Model, machine: Machine, handlers: HandlerTable) -> Choice:
    """Choose the handler of `model` from the table `handlers`.

    Values in `given` decide before the files of the model do.
    """
    engine = given.get("engine")
    served_elsewhere = None if engine is None else handlers.by_engine(engine.raw)
    if served_elsewhere is not None:
        return Choice(served_elsewhere, "engine", engine)
    entry_point = given.get(ENTRY_POINT)
    if entry_point is not None and entry_point.layer == _ALIAS and _is_handler_file(model.directory, given, handlers):
        entry_point = (
            None  # as with LMI, a model.py that takes requests wins over the handler that an engine stands for
        )
    chosen = (
        _by_model(given, model, handlers)
        if entry_point is None
        else _by_entry_point(entry_point, model.directory, handlers)
    )
    # The variant first: a model that does not decode has no rolling batch that could choose a handler. Then once more,
    # because the handler that the rolling batch has chosen may have a variant, too.
    workload = _workload(given, model.task)
    chosen = _variant(chosen, workload, handlers)
    if chosen.spec is not None and chosen.spec.rolling_batch_decides:
        chosen = _variant(_by_rolling_batch(chosen, given, model, machine, handlers), workload, handlers)
        batched = replace(workload, architectures=model.architectures, config=model.config)
        chosen = _without_rolling_batch(chosen, given, batched, machine, handlers)
    return _with_rolling_batch_as_reason(chosen, given)


def _with_rolling_batch_as_reason(chosen: Choice, given: Given) -> Choice:
    """Return the choice with option.rolling_batch as its reason, if that has left no other handler to choose."""
    rolling = given.get(ROLLING_BATCH)
    decides = chosen.source is None and chosen.spec is not None and chosen.spec.reads_checkpoint
    if rolling is None or rolling.raw.lower() == "auto" or not decides:
        return chosen
    return replace(chosen, key=ROLLING_BATCH, source=rolling)


def _workload(given: Given, task: str | None) -> Workload:
    rolling = given.get(ROLLING_BATCH)
    return Workload(
        task=task,
        rolling_batch=None if rolling is None else rolling.raw.lower(),
        under_mpi=MPI_MODE in given and given[MPI_MODE].is_true,
        batches_statically=batches_statically(given),
        true_keys=frozenset(key for key, source in given.items() if source.is_true),
        max_model_len=_whole(given.get(MAX_MODEL_LEN)),
    )


def _whole(source: Source | None) -> int | None:
    """Return a number of up to nine digits; None for anything else, which is reported where values are checked."""
    raw = "" if source is None else source.raw
    return int(raw) if raw.isascii() and raw.isdigit() and len(raw) < 10 else None


def _variant(chosen: Choice, workload: Workload, handlers: HandlerTable) -> Choice:
    title = None if chosen.spec is None else chosen.spec.variant_for(workload)
    return chosen if title is None else replace(chosen, spec=handlers.by_title(title))


def _without_rolling_batch(
    chosen: Choice, given: Given, workload: Workload, machine: Machine, handlers: HandlerTable
) -> Choice:
    """Return who serves an architecture that the rolling batch of the chosen handler cannot serve, with a note.

    An engine that can batch it comes first. But as with LMI, a user who names huggingface and no rolling batch gets the
    handler of that name.
    """
    free = chosen.source is None or ROLLING_BATCH in given
    engine = next((spec for spec in handlers.specs if spec.takes_over(workload.architectures, machine)), None)
    if reads_more_than_text(chosen.spec, workload):
        return _with_engine_for_more(chosen, engine, workload) if free and engine is not None else chosen
    static = _variant(chosen, workload, handlers)
    if static.spec is chosen.spec:
        return chosen
    names = ", ".join(workload.architectures)
    reason = None if chosen.spec is None else chosen.spec.cannot_batch(workload)
    why = "" if reason is None else f" ({reason})"
    cannot = f"{names} cannot run under the rolling batch of transformers{why} and is served"
    if free and engine is not None:
        own = f"option.rolling_batch={engine.rolling_batches[0]}"
        note = (
            f"{cannot} with {engine.title}; {own} says so without this warning, and option.rolling_batch=disable serves"
            " it in static batches"
        )
        return replace(chosen, spec=engine, note=note)
    note = (
        f"{cannot} in static batches; option.rolling_batch=disable says so without this warning, and"
        " option.rolling_batch=vllm serves it if vLLM can"
    )
    return replace(static, note=note)


def reads_more_than_text(spec: HandlerSpec | None, workload: Workload) -> bool:
    """Return whether the model reads images or sounds beside text, and `spec`, chosen by auto, decodes text alone."""
    names = workload.architectures
    text_alone = spec is not None and spec.causal_lm_only and not is_causal_lm(names)
    by_auto = workload.rolling_batch in (None, "auto") and not workload.under_mpi and not workload.batches_statically
    return text_alone and by_auto and any(name.endswith(READS_MORE) for name in names)


def _with_engine_for_more(chosen: Choice, engine: HandlerSpec, workload: Workload) -> Choice:
    own = f"option.rolling_batch={engine.rolling_batches[0]}"
    note = (
        f"{', '.join(workload.architectures)} reads more than text, and is served with {engine.title}; {own} says so"
        " without this warning"
    )
    return replace(chosen, spec=engine, note=note)


def _by_model(given: Given, model: Model, handlers: HandlerTable) -> Choice:
    if _is_handler_file(model.directory, given, handlers):
        return Choice(handlers.user_code)
    return Choice(_by_files(model, handlers) or handlers.by_task(model.task) or handlers.default)


def _by_files(model: Model, handlers: HandlerTable) -> HandlerSpec | None:
    found = handlers.by_files(model.directory)
    return found if found is not None or model.weights is None else handlers.by_files(model.weights)


def _is_handler_file(model_dir: Path, given: Given, handlers: HandlerTable) -> bool:
    """Return True if model.py is the handler itself, not just formatters for a built-in handler.

    It brings just formatters if a built-in handler finds a model, and model.py defines nothing that takes requests.
    """
    path = model_dir / MODEL_CODE
    if not path.is_file():
        return False
    has_config = (model_dir / "config.json").is_file()
    has_model = "option.model_id" in given or has_config or handlers.by_files(model_dir) is not None
    return HANDLER in given or not has_model or takes_requests(path)


def _by_entry_point(source: Source, model_dir: Path, handlers: HandlerTable) -> Choice:
    name = source.raw
    place = source.describe(ENTRY_POINT)
    try:
        refuse_remote_entry_point(name)
    except ValueError as error:
        return Choice(None, ENTRY_POINT, source, f"{place} {error}")
    spec = handlers.by_entry_point(name) or (handlers.user_code if _is_own_code(name, model_dir) else None)
    if spec is not None:
        return Choice(spec, ENTRY_POINT, source)
    if name.endswith(".py"):
        return Choice(None, ENTRY_POINT, source, f"{place} is not allowed; there is no file {model_dir / name}")
    names = handlers.entry_points()
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    advice = f"; did you mean {nearest[0]}?" if nearest else ""
    allowed = f"{', '.join(names)}, a Python file of the model directory, an absolute path, a dotted module"
    return Choice(None, ENTRY_POINT, source, f"{place} is not allowed; allowed: {allowed}{advice}")


def _is_own_code(name: str, model_dir: Path) -> bool:
    if name.endswith(".py"):
        return os.path.isfile(model_dir / name)  # an absolute name replaces model_dir
    if _MODULE.fullmatch(name) is None or name.startswith("djl_python."):
        return False
    # Only the top-level package is looked for: find_spec of a submodule imports its parents, and so would run code of
    # the model in the server process.
    package = name.partition(".")[0]
    in_model = os.path.isdir(model_dir / package) or os.path.isfile(model_dir / f"{package}.py")
    return in_model or find_spec(package) is not None


def _by_rolling_batch(chosen: Choice, given: Given, model: Model, machine: Machine, handlers: HandlerTable) -> Choice:
    """Choose among the handlers that one entry point stands for (LMI's huggingface), by option.rolling_batch."""
    rolling, mpi = given.get(ROLLING_BATCH), given.get(MPI_MODE)
    if rolling is not None and rolling.raw.lower() != "auto":
        spec = handlers.by_rolling_batch(rolling.raw.lower())
        return chosen if spec in (None, chosen.spec) else Choice(spec, ROLLING_BATCH, rolling)
    under_mpi = mpi is not None and mpi.is_true
    # As with LMI, a user who names huggingface and no rolling batch gets the handler of that name. Without an entry
    # point, or with option.rolling_batch=auto, the best handler for the model and the machine is chosen.
    if chosen.source is not None and rolling is None and not under_mpi:
        return chosen
    if model.in_gguf and not under_mpi and chosen.spec is not None and chosen.spec.reads_gguf:
        return chosen
    spec = handlers.by_rolling_batch(recommend_rolling_batch(model.architectures, under_mpi, machine, handlers))
    if spec is chosen.spec or spec is None:
        return chosen
    if mpi is not None and under_mpi:
        return Choice(spec, MPI_MODE, mpi)
    return Choice(spec, ROLLING_BATCH, rolling) if rolling is not None else Choice(spec)

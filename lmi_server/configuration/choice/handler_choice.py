"""Chooses the handler of a model by engine, entry point, files, task and option.rolling_batch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

from lmi_server.artifacts.location import refuse_remote_entry_point
from lmi_server.configuration.choice.deciding_keys import ENTRY_POINT, MPI_MODE, ROLLING_BATCH, DecidingKeys
from lmi_server.configuration.choice.recommender import recommend_rolling_batch
from lmi_server.configuration.handlers import HandlerSpec, HandlerTable
from lmi_server.configuration.layers import Given, Source
from lmi_server.configuration.model_directory.checkpoint import READS_MORE, CheckpointFacts
from lmi_server.configuration.model_directory.model_code import MODEL_CODE, takes_requests
from lmi_server.configuration.tasks import Workload
from lmi_server.machine.inventory import Machine

# What LMI makes of these engines. Both run Python code, one process per device.
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "DeepSpeed": {MPI_MODE: "true", ENTRY_POINT: "djl_python.deepspeed"},
    "MPI": {MPI_MODE: "true", ENTRY_POINT: "djl_python.huggingface"},
}
_ALIAS: Final = "engine alias"  # the layer of what an engine stands for
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def engine_alias(engine: Source | None, own_code: bool = False) -> Given:
    """Return the values that an engine stands for, engine=MPI for example; with `own_code` all but the entry point."""
    if engine is None:
        return {}
    visible = replace(engine, layer=_ALIAS, spelling="engine", written=engine.raw)
    values = _ALIASES.get(engine.raw, {})
    return {key: replace(visible, raw=raw) for key, raw in values.items() if not (own_code and key == ENTRY_POINT)}


@dataclass(frozen=True, slots=True)
class HandlerChoice:
    """The handler, and the `key` and `source` that decided it, if a key did.

    If the entry point names no handler, `spec` is None and `problem` says why. `note` is a warning about the choice.
    `reason` says in words what decided: a key with its place, a file of the model, or its architecture.
    """

    spec: HandlerSpec | None
    key: str | None = None
    source: Source | None = None
    problem: str | None = None
    note: str | None = None
    reason: str = ""

    @property
    def place(self) -> str | None:
        """Return place, key and value of what decided; None if no key did."""
        return None if self.source is None or self.key is None else self.source.describe(self.key)

    def missing(self, checkpoint: CheckpointFacts, handlers: HandlerTable) -> str | None:
        """Return why this version cannot serve with the handler; None if it can."""
        if self.spec is None or self.spec.handler is not None:
            return None
        place = self.place or f"{checkpoint.directory / MODEL_CODE}:"
        served = " or ".join(handlers.served_entry_points())
        return f"{place} is not available in this version; missing: {self.spec.title}; served are {served}"


def choose_handler(
    keys: DecidingKeys, checkpoint: CheckpointFacts, machine: Machine, handlers: HandlerTable
) -> HandlerChoice:
    """Choose the handler of a model from the table `handlers`; keys decide before the files of the model do."""
    chooser = _Chooser(keys, checkpoint, machine, handlers)
    choice = chooser.choose()
    return replace(choice, reason=choice.place or chooser.reason_in_files(choice))


@dataclass(frozen=True, slots=True)
class _Chooser:
    keys: DecidingKeys
    checkpoint: CheckpointFacts
    machine: Machine
    handlers: HandlerTable

    def choose(self) -> HandlerChoice:
        engine = self.keys.engine
        served_elsewhere = None if engine is None else self.handlers.by_engine(engine)
        if served_elsewhere is not None:
            return self._by_key(served_elsewhere, "engine")
        # The variant first: a model that does not decode has no rolling batch to choose a handler. Then once
        # more, because the handler that the rolling batch has chosen may have a variant, too.
        workload = self._workload()
        chosen = self._variant(self._by_entry_point() or self._by_model(), workload)
        if chosen.spec is not None and chosen.spec.rolling_batch_decides:
            chosen = self._variant(self._by_rolling_batch(chosen, chosen.spec), workload)
            batched = replace(workload, architectures=self.checkpoint.architectures, config=self.checkpoint.config)
            chosen = self._without_rolling_batch(chosen, batched)
        # option.rolling_batch is the reason if it has left no other handler to choose.
        decides = chosen.source is None and chosen.spec is not None and chosen.spec.reads_checkpoint
        if not self._batches_by_auto and decides:
            return replace(chosen, key=ROLLING_BATCH, source=self.keys.source(ROLLING_BATCH))
        return chosen

    def reason_in_files(self, choice: HandlerChoice) -> str:
        """Return what chose the handler if no key did."""
        if choice.spec is self.handlers.user_code:
            return f"{MODEL_CODE} takes the requests"
        if choice.spec is self._by_files():
            return "the model directory holds a file of its kind"
        suits = ", ".join(self.checkpoint.architectures) or self._task or "an unknown model"
        return f"no key names one, and it suits {suits} on this machine"

    @property
    def _task(self) -> str | None:
        return self.keys.task or self.checkpoint.task

    @property
    def _batches_by_auto(self) -> bool:
        """Whether option.rolling_batch names no handler."""
        return self.keys.rolling_batch in (None, "auto")

    def _workload(self) -> Workload:
        return Workload(
            task=self._task,
            rolling_batch=self.keys.rolling_batch,
            under_mpi=self.keys.mpi_mode,
            batches_statically=self.keys.batches_statically,
            use_stable_diffusion=self.keys.use_stable_diffusion,
            max_model_len=self.keys.max_model_len,
            in_8_bits=self.keys.quantises_to_8_bits,
        )

    def _by_key(self, spec: HandlerSpec | None, key: str, problem: str | None = None) -> HandlerChoice:
        return HandlerChoice(spec, key, self.keys.source(key), problem)

    def _by_entry_point(self) -> HandlerChoice | None:
        """Choose by option.entryPoint; None if no layer gives one that decides."""
        name, source = self.keys.entry_point, self.keys.source(ENTRY_POINT)
        if name is None or source is None or (source.layer == _ALIAS and self._is_handler_file()):
            return None  # as with LMI, a model.py that takes requests wins over the handler of an engine
        place = source.describe(ENTRY_POINT)
        try:
            refuse_remote_entry_point(name)
        except ValueError as error:
            return self._by_key(None, ENTRY_POINT, f"{place} {error}")
        spec = self.handlers.by_entry_point(name) or (self.handlers.user_code if self._is_own_code(name) else None)
        if spec is not None:
            return self._by_key(spec, ENTRY_POINT)
        if name.endswith(".py"):
            missing = f"there is no file {self.checkpoint.directory / name}"
            return self._by_key(None, ENTRY_POINT, f"{place} is not allowed; {missing}")
        names = self.handlers.entry_points()
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        advice = f"; did you mean {nearest[0]}?" if nearest else ""
        allowed = f"{', '.join(names)}, a Python file of the model directory, an absolute path, a dotted module"
        return self._by_key(None, ENTRY_POINT, f"{place} is not allowed; allowed: {allowed}{advice}")

    def _is_own_code(self, name: str) -> bool:
        directory = self.checkpoint.directory
        if name.endswith(".py"):
            return os.path.isfile(directory / name)  # an absolute name replaces the directory
        if _MODULE.fullmatch(name) is None or name.startswith("djl_python."):
            return False
        # Only the top-level package is looked for: find_spec of a submodule imports its parents, and so would run code
        # of the model in the server process.
        package = name.partition(".")[0]
        in_model = os.path.isdir(directory / package) or os.path.isfile(directory / f"{package}.py")
        return in_model or find_spec(package) is not None

    def _by_model(self) -> HandlerChoice:
        if self._is_handler_file():
            return HandlerChoice(self.handlers.user_code)
        return HandlerChoice(self._by_files() or self.handlers.by_task(self._task) or self.handlers.default)

    def _by_files(self) -> HandlerSpec | None:
        places = (self.checkpoint.directory, self.checkpoint.weights)
        found = (self.handlers.by_files(place) for place in places if place is not None)
        return next((spec for spec in found if spec is not None), None)

    def _is_handler_file(self) -> bool:
        """Return True if model.py is the handler itself, not just formatters for a built-in handler.

        It brings just formatters if a built-in handler finds a model, and model.py defines nothing that takes requests.
        """
        directory = self.checkpoint.directory
        path = directory / MODEL_CODE
        if not path.is_file():
            return False
        in_directory = self.checkpoint.holds_config or self.handlers.by_files(directory) is not None
        has_model = self.keys.model_id is not None or in_directory
        return self.keys.handler is not None or not has_model or takes_requests(path)

    def _variant(self, chosen: HandlerChoice, workload: Workload) -> HandlerChoice:
        variant = None if chosen.spec is None else chosen.spec.variant_for(workload)
        if variant is None:
            return chosen
        return replace(chosen, spec=self.handlers.by_title(variant.title), note=variant.note or chosen.note)

    def _by_rolling_batch(self, chosen: HandlerChoice, default: HandlerSpec) -> HandlerChoice:
        """Choose among the handlers that one entry point stands for (LMI's huggingface), by option.rolling_batch."""
        keys, handlers = self.keys, self.handlers
        if keys.rolling_batch is not None and not self._batches_by_auto:
            spec = handlers.by_rolling_batch(keys.rolling_batch)
            return chosen if spec in (None, default) else self._by_key(spec, ROLLING_BATCH)
        # As with LMI, a user who names huggingface and no rolling batch gets the handler of that name. Without an entry
        # point, or with option.rolling_batch=auto, the best handler for the model and the machine is chosen.
        if chosen.source is not None and keys.rolling_batch is None and not keys.mpi_mode:
            return chosen
        if self.checkpoint.in_gguf and not keys.mpi_mode and default.reads_gguf:
            return chosen
        architectures = self.checkpoint.architectures
        best = recommend_rolling_batch(architectures, keys.mpi_mode, self.machine, handlers)
        spec = handlers.by_rolling_batch(best)
        if spec is default or spec is None:
            return chosen
        if keys.mpi_mode:
            return self._by_key(spec, MPI_MODE)
        return HandlerChoice(spec) if keys.rolling_batch is None else self._by_key(spec, ROLLING_BATCH)

    def _without_rolling_batch(self, chosen: HandlerChoice, workload: Workload) -> HandlerChoice:
        """Choose another handler if the rolling batch of the chosen one cannot serve the architecture, and note that.

        An engine that can batch it comes first. But as with LMI, a user who names huggingface and no rolling batch gets
        the handler of that name.
        """
        names = ", ".join(workload.architectures)
        free = chosen.source is None or self.keys.rolling_batch is not None
        batching = (spec for spec in self.handlers.specs if spec.takes_over(workload.architectures, self.machine))
        engine = next(batching, None) if free else None
        own = "" if engine is None else f"{engine.title}; option.rolling_batch={engine.rolling_batches[0]} says so"
        if self._reads_more_than_text(chosen, workload):
            note = f"{names} reads more than text, and is served with {own} without this warning"
            return chosen if engine is None else replace(chosen, spec=engine, note=note)
        static = self._variant(chosen, workload)
        if static.spec is chosen.spec:
            return chosen
        cannot = f"{names} cannot run under the rolling batch of transformers and is served"
        if engine is not None:
            disable = "option.rolling_batch=disable serves it in static batches"
            return replace(chosen, spec=engine, note=f"{cannot} with {own} without this warning, and {disable}")
        disable, vllm = "option.rolling_batch=disable says so", "option.rolling_batch=vllm serves it if vLLM can"
        return replace(static, note=f"{cannot} in static batches; {disable} without this warning, and {vllm}")

    def _reads_more_than_text(self, chosen: HandlerChoice, workload: Workload) -> bool:
        """Return whether the model reads images or sounds too, and its handler, chosen by auto, decodes text alone."""
        names = workload.architectures
        text_alone = chosen.spec is not None and not chosen.spec.decodes(names)
        by_auto = self._batches_by_auto and not workload.under_mpi and not workload.batches_statically
        return text_alone and by_auto and any(name.endswith(READS_MORE) for name in names)

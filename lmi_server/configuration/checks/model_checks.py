"""Checks of one model beyond its single values: combinations, formatters, the checkpoint, undeclared keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_server.artifacts.location import NO_WORKFLOWS, WORKFLOW_SUFFIXES
from lmi_server.configuration.checks.values import (
    combination_warnings,
    conflicts,
    unavailable,
    undefined_formatters,
    value_warnings,
)
from lmi_server.configuration.choice.deciding_keys import ROLLING_BATCH
from lmi_server.configuration.choice.engine_recipe import (
    REQUIREMENTS_KEY,
    VERSION_KEY,
    engine_recipe,
    untested_version,
)
from lmi_server.configuration.choice.handler_choice import HandlerChoice
from lmi_server.configuration.declaration import Option
from lmi_server.configuration.engine import describe_engine, load_engine_type
from lmi_server.configuration.handlers import HandlerSpec, HandlerTable, load_options_type
from lmi_server.configuration.layers import DERIVED, Given, SortedKeys, nearest_key, spellings, unknown_key_warning
from lmi_server.configuration.model_directory.checkpoint import READS_MORE, CheckpointFacts
from lmi_server.configuration.model_directory.gguf import gguf_files, read_gguf
from lmi_server.configuration.model_directory.model_code import MODEL_CODE, defines
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.inventory import Machine


@dataclass(frozen=True, slots=True)
class ModelChecks:
    """A model with merged and typed values, before it is known whether they are right.

    `choice` says how its handler was chosen from `handlers`. `spec` is that handler, or the default one if the choice
    failed. `misplaced` is the problem if option.model_id names no location.
    """

    checkpoint: CheckpointFacts
    misplaced: str | None
    choice: HandlerChoice
    spec: HandlerSpec
    handlers: HandlerTable
    merged: SortedKeys
    serving: ServingOptions
    options: ModelOptions
    machine: Machine

    def problems(self, wrong: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for each error; `wrong` are those of single values, by key in full."""
        # One of these files makes LMI take a directory for a workflow, whatever else it holds.
        workflows = (self.checkpoint.directory / f"workflow{suffix}" for suffix in WORKFLOW_SUFFIXES)
        workflow = next((path for path in workflows if path.is_file()), None)
        if workflow is not None:  # a workflow is not a model: skip the model checks
            yield f"{workflow}: {NO_WORKFLOWS}"
            return
        known = self.merged.known
        yield from self.merged.problems
        # In the order of the file, because the user mends it from top to bottom.
        yield from (wrong[key] for key in sorted(wrong, key=lambda key: known[key].line or 0))
        if self.misplaced is not None:
            yield self.misplaced
        yield from conflicts(self.spec, self.serving, self.options, {**self.merged.unknown, **known}, wrong)
        if self.choice.problem is not None:
            yield self.choice.problem
        elif self.misplaced is None:
            yield from self._no_checkpoint()
            yield from self._no_index()
            yield from self._wrong_for_gguf()
            yield from self._wrong_for_files()
        if not wrong.keys() & {VERSION_KEY, REQUIREMENTS_KEY}:
            yield from self._wrong_environment()
        if self.spec.formats_text:
            yield from undefined_formatters(self.options, known, self.checkpoint.directory)

    def _no_checkpoint(self) -> Iterator[str]:
        directory = self.checkpoint.directory
        if not self.spec.reads_checkpoint or self.checkpoint.location != str(directory) or self.checkpoint.holds_config:
            return
        missing = "holds no config.json, and option.model_id (or HF_MODEL_ID) names no other model"
        if (directory / "model_index.json").is_file():
            missing = "holds a pipeline of diffusers; set option.entryPoint=djl_python.stable_diffusion"
        if (directory / "MAR-INF").is_dir():
            missing = "is an archive of TorchServe (MAR-INF), which is not served; put a model.py beside its files"
        in_gguf = ", ".join(path.name for path in gguf_files(directory))
        if in_gguf:
            missing = f"holds several models in GGUF ({in_gguf}); set option.model_id to the name of one"
        yield f"{directory}: {missing}"

    def _no_index(self) -> Iterator[str]:
        index, weights = self.spec.weights_index, self.checkpoint.weights
        if index is not None and weights is not None and not (weights / index).is_file():
            yield f"{weights}: holds no {index}; name a model that {self.spec.title} serves in option.model_id"

    def _wrong_for_gguf(self) -> Iterator[str]:
        if not self.checkpoint.in_gguf or not self.spec.reads_checkpoint:
            return
        if not self.spec.reads_gguf:
            yield (
                f"{self.checkpoint.location}: {self.spec.title} reads no GGUF; set option.rolling_batch=scheduler for"
                " the huggingface handler, which does"
            )
            return
        problem = read_gguf(Path(self.checkpoint.location)).problem()
        if problem is not None:
            yield f"{self.checkpoint.location}: {problem}; name the original checkpoint in option.model_id"
        for key in ("option.quantize", "option.mpi_mode"):
            source = self.merged.known.get(key)
            if source is not None and source.raw.lower() not in ("", "false"):
                yield f"{source.describe(key)} is not allowed for a model in GGUF; remove it"

    def _wrong_for_files(self) -> Iterator[str]:
        location = Path(self.checkpoint.location)
        _, gpus = self.spec.devices(self.machine)
        on_gpus = bool(gpus) and any(entry.strip() != "cpu" for entry in self.serving.load_on_devices.split(";"))
        engine = describe_engine(self.spec, self.options)
        found = engine.checkpoint_problem(location, self.checkpoint.config, on_gpus)
        if found is not None and found[0] in self.merged.known:
            yield f"{self.merged.known[found[0]].describe(found[0])} is not allowed; {found[1]}"

    def _wrong_environment(self) -> Iterator[str]:
        try:
            engine_recipe(describe_engine(self.spec, self.options), self.checkpoint.directory, self.machine)
        except ConfigurationError as error:
            yield f"{self.checkpoint.directory}: {error.message}"

    def unavailable(self) -> Iterator[str]:
        """Yield a line for each value that this version cannot serve; if it lacks the handler, only for that."""
        missing = self.choice.missing(self.checkpoint, self.handlers)
        if missing is not None:
            yield missing
            return
        known = self.merged.known
        yield from unavailable(self.serving, known)
        if self.serving.batch_size > 1 and self.choice.spec is not None and not self.spec.takes_batches:
            yield (
                f"{known['batch_size'].describe('batch_size')} is not available in this version; "
                "the rolling batch decodes requests together; remove the key"
            )
        yield from unavailable(self.options, known)
        if self.choice.spec is not None:
            yield from self._unsuitable_architectures()
            yield from self._executor_of_ray()

    def _executor_of_ray(self) -> Iterator[str]:
        """Yield a line for vLLM's executor of Ray on a CPU; vLLM itself says so without the key, a minute later."""
        key = "option.distributed_executor_backend"
        source = self.merged.unknown.get(key)
        if source is None or source.raw != "ray" or self.machine.device_kind != "cpu":
            return
        if key.removeprefix("option.") in load_engine_type(self.spec).argument_names():
            yield (
                f"{source.describe(key)} is not available on a CPU: vLLM runs its ranks by Ray on GPUs alone; remove it"
            )

    def _unsuitable_architectures(self) -> Iterator[str]:
        names = self.checkpoint.architectures
        if self.spec.answers_tasks and "option.task" not in self.merged.known:
            yield (
                f"{self.checkpoint.directory}: no task follows from architecture {', '.join(names) or 'unknown'}; "
                "set option.task"
            )
        if names and not self.spec.decodes(names):
            yield f"{self.checkpoint.directory}: architecture {', '.join(names)} {self._why_not_decoded(names)}"

    def _why_not_decoded(self, names: tuple[str, ...]) -> str:
        """Return why the rolling batch does not decode a model, and what serves it."""
        if not any(name.endswith(READS_MORE) for name in names):
            return f"{self._needs_causal_lm()}; set option.task, for example option.task=text-embedding"
        engine = next(spec for spec in self.handlers.specs if spec.generates is not None)
        if not self.machine.engines.issuperset(engine.engines):
            return f"reads more than text, which {engine.title} serves; {engine.installed_by}"
        if not engine.takes_over(names, self.machine):
            return f"reads more than text, and the installed {engine.title} does not know it; install a newer one"
        return f"{self._needs_causal_lm()}; set option.rolling_batch={engine.rolling_batches[0]}"

    def _needs_causal_lm(self) -> str:
        source = self.merged.known.get(ROLLING_BATCH)
        named = source is not None and source.layer not in DERIVED
        what = f"option.rolling_batch={self.options.rolling_batch}" if named else "the rolling batch of transformers"
        return f"cannot be decoded by {what}, which needs a causal language model (*ForCausalLM)"

    def warnings(self) -> Iterator[str]:
        """Yield a line for each value that is deprecated, has no effect, or is undeclared."""
        known = self.merged.known
        if self.choice.note is not None:
            yield self.choice.note
        yield from self.merged.warnings
        yield from _unknown_key_warnings(self.merged.unknown, self.spec, self.handlers)
        yield from value_warnings(self.serving, known)
        yield from value_warnings(self.options, known)
        yield from combination_warnings(describe_engine(self.spec, self.options), known, self.machine)
        yield from self._untested_version()
        yield from self._degree_without_gpus()
        yield from self._handle_without_effect()

    def _handle_without_effect(self) -> Iterator[str]:
        """Only a handler that generates text leaves its requests to a `handle` first."""
        path = self.checkpoint.directory / MODEL_CODE
        named = self.choice.source is not None and not self.spec.runs_user_code
        if named and not self.spec.formats_text and path.is_file() and defines(path, "handle"):
            yield f"{path}: handle has no effect on {self.spec.title}; remove option.entryPoint to have it serve"

    def _untested_version(self) -> Iterator[str]:
        source = self.merged.known.get(VERSION_KEY)
        said = untested_version(describe_engine(self.spec, self.options), self.machine) if source is not None else None
        if source is not None and said is not None:
            yield f"{source.describe(VERSION_KEY)} {said}"

    def _degree_without_gpus(self) -> Iterator[str]:
        degree = self.options.tensor_parallel_degree
        on_cpu = self.machine.device_kind == "cpu" and self.options.ranks is None
        if on_cpu and self.spec.degree_without_gpus == "nothing" and degree != "max" and degree > 1:
            key = "option.tensor_parallel_degree"
            yield (
                f"{self.merged.known[key].describe(key)} gives no GPU to a worker, because none is visible; "
                "the worker runs on the CPU"
            )


def declared_options(spec: HandlerSpec) -> Sequence[Option]:
    """Return every option that a model with this handler may have."""
    return (*ServingOptions.declared_options(), *load_options_type(spec).declared_options())


def _unknown_key_warnings(unknown: Given, spec: HandlerSpec, handlers: HandlerTable) -> Iterator[str]:
    of_engine = load_engine_type(spec).argument_names()
    known = [*spellings(declared_options(spec)), *(f"option.{name}" for name in sorted(of_engine))]
    owners = _handlers_by_key(handlers) if unknown else {}
    for index, (key, source) in enumerate(unknown.items()):
        if key.removeprefix("option.") in of_engine:
            continue
        others = owners.get(key)
        if index == _MAX_ADVISED:
            known = []  # looking for the nearest key takes a millisecond
        if spec.runs_user_code:
            if nearest_key(key, known) is not None:  # otherwise it is a key of the user's code, not a misspelling
                yield unknown_key_warning(key, source, known, "it is passed on to the handler")
        elif others:
            yield f"{source.place}: {key} has no effect on {spec.title}; it is an option of {', '.join(others)}"
        else:
            yield unknown_key_warning(key, source, known)


def _handlers_by_key(handlers: HandlerTable) -> Mapping[str, list[str]]:
    """Return the titles of the handlers that declare each key."""
    found: dict[str, list[str]] = {}
    for spec in handlers.specs:
        for key in spellings(load_options_type(spec).declared_options()):
            found.setdefault(key, []).append(spec.title)
    return found


_MAX_ADVISED = 200  # undeclared keys of a model for which the nearest declared one is looked for

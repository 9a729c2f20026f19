"""Explains a configuration: the source of each value, and what follows from all of them.

That is the command and the environment of a worker, the arguments of the engine, and the memory.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmi_server.configuration.checks.memory_estimate import Estimate, estimate, shortages
from lmi_server.configuration.choice.engine_recipe import engine_recipe, missing_uv
from lmi_server.configuration.declaration import Deprecated, DeprecatedValue, NoEffect, Option
from lmi_server.configuration.handlers import load_options_type
from lmi_server.configuration.layers import Source
from lmi_server.configuration.model_directory.checkpoint import read_config
from lmi_server.configuration.model_directory.gguf import is_gguf
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.resolve import Inspection, ResolvedModel
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.ranks import RankGroup
from lmi_server.contract.texts.secrets import HIDDEN, SECRETS, is_secret
from lmi_server.explain.checkpoint_files import file_faults, gguf_fault, pipeline_faults
from lmi_server.machine.devices import DeviceSet, plan_devices
from lmi_server.machine.inventory import Machine
from lmi_server.machine.mpi import NO_MPIRUN, OPEN_MPI, MpiRun
from lmi_server.supervisor.launch.command import mpi_worker_command, worker_command

# Placeholders: the numbers of descriptors and the directory of a group of ranks are made when a worker starts.
_FD = "fd:N"
_GROUP_DIRECTORY = "GROUP"
_OWN_ENVIRONMENT = "ENVIRONMENT/bin/python"
_DEVICES = {"gpu": "an NVIDIA GPU", "nc": "a Neuron device"}
# Arguments that are passed on to vLLM: the tokenizer is somewhere else, or there is none.
_TOKENIZER_ELSEWHERE = ("option.tokenizer", "option.skip_tokenizer_init")
_ANY_FORMAT = Source("default", "auto")
_ELSEWHERE = Source("default", "")  # of a value whose layers another node has read, which deployed the model
_ANY_MPIRUN = MpiRun("mpirun", OPEN_MPI, "5")


@dataclass(frozen=True, slots=True)
class ExplainedOption:
    """One key: its typed value and default, and the origin of the value (`place`: file and line, or a variable)."""

    key: str
    value: Any
    layer: str
    place: str
    meaning: str
    allowed: str
    default: Any
    note: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The report of `lmi-server explain` on one model, in JSON's types.

    `environment` has the packages of an engine of the model's own; it is empty if the engine is the server's.
    `problems` are wrong values, `unavailable` is what cannot be served here, `files` what is wrong with files.
    """

    name: str
    model_dir: str
    handler: str
    handler_reason: str
    model: str
    division: str | None
    can_be_served: bool
    options: tuple[ExplainedOption, ...]
    unknown: tuple[ExplainedOption, ...]
    devices: tuple[Mapping[str, Any], ...]
    worker_command: tuple[str, ...]
    worker_environment: Mapping[str, str]
    environment: tuple[str, ...]
    engine_arguments: Mapping[str, Any]
    memory: Mapping[str, Any]
    machine: Mapping[str, Any]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    unavailable: tuple[str, ...]
    files: tuple[str, ...]

    def as_json_values(self) -> dict[str, Any]:
        """Return the explanation as dictionaries, lists and plain values."""
        return asdict(self)

    def without_secrets(self) -> Explanation:
        """Return the explanation with tokens, passwords and the like hidden."""
        hidden = {field.name: SECRETS.mask_all(getattr(self, field.name)) for field in fields(self)}
        hidden |= {name: tuple(map(_without_secret, getattr(self, name))) for name in ("options", "unknown")}
        return replace(self, **hidden)


def _without_secret(explained: ExplainedOption) -> ExplainedOption:
    value = HIDDEN if explained.value and is_secret(explained.key) else SECRETS.mask_all(explained.value)
    return replace(explained, value=value)


def _is_program(name: str, model_dir: str) -> bool:
    return shutil.which(name) is not None or Path(model_dir, name).is_file()


def explain(found: Inspection) -> Explanation:
    """Explain the configuration that `inspect_model` found."""
    device_sets, shortage = _devices(found)
    needed = memory_of(found)
    absent, may_come = _absent(found)
    faults = file_problems(found)
    return Explanation(
        name=found.name,
        model_dir=found.model_dir,
        handler=found.spec.title,
        handler_reason=found.handler_reason,
        model=found.location,
        division=found.engine.division(len(device_sets[0].gpus) if device_sets else 0),
        can_be_served=bool(device_sets)
        and not found.problems
        and not faults
        and not found.unavailable
        and not absent
        and found.spec.handler is not None,
        options=tuple(_explain_options(found, found.location)),
        unknown=_explain_unknown(found, found.unknown),
        devices=tuple({"kind": devices.kind, "gpus": list(devices.gpus)} for devices in device_sets),
        worker_command=tuple(_command(found.options, found.machine)),
        worker_environment={
            **found.worker_environment,
            **(device_sets[0].environment if device_sets else {}),
            **_rank_environment(found.options),
        },
        environment=_environment(found),
        engine_arguments=found.options.engine_arguments(),
        memory=_memory(needed),
        machine=_machine(found.machine),
        warnings=(*found.warnings, *shortage, *needed.warnings(), *_memory_warnings(found), *may_come),
        problems=found.problems,
        unavailable=(*found.unavailable, *absent),
        files=faults,
    ).without_secrets()


def explain_values(model: ResolvedModel) -> tuple[ExplainedOption, ...]:
    """Explain the values that a running model was loaded with, secrets hidden; undeclared keys come last."""
    declared = _explain_options(model, model.options.model_id or model.model_dir)
    keys = {explained.key for explained in declared}
    unknown = _explain_unknown(model, {key: source for key, source in model.sources.items() if key not in keys})
    return tuple(map(_without_secret, (*declared, *unknown)))


def memory_of(found: Inspection) -> Estimate:
    """Estimate the memory of one worker on each of its devices."""
    degree = found.engine.devices_per_worker(found.machine)
    return estimate(found.engine.memory, found.location, found.config, degree, found.machine)


def memory_of_running(model: ResolvedModel, machine: Machine) -> Estimate:
    """Estimate the memory of one worker of a model that was loaded, on each of its devices."""
    location, engine = model.options.model_id or model.model_dir, model.engine
    return estimate(engine.memory, location, read_config(location), engine.devices_per_worker(machine), machine)


def _explain_options(found: Inspection | ResolvedModel, location: str) -> Sequence[ExplainedOption]:
    notes = found.engine.notes(Path(found.model_dir), Path(location))
    classes = ((ServingOptions, found.serving), (load_options_type(found.spec), found.options))
    return [
        _with_origin(option, getattr(values, option.field), found.sources.get(option.key, _ELSEWHERE), notes)
        for declaring, values in classes
        for option in declaring.declared_options()
    ]


def _with_origin(option: Option, value: Any, source: Source, notes: Mapping[str, str]) -> ExplainedOption:
    return ExplainedOption(
        key=option.key,
        value=value,
        layer="cluster" if source is _ELSEWHERE else source.layer,
        place=_place(source),
        meaning=option.description,
        allowed=option.allowed,
        default=option.default,
        note=notes.get(option.key) or _note(option, source),
    )


def _place(source: Source) -> str:
    return source.place if source.place != source.layer else ""


def _note(option: Option, source: Source) -> str:
    if option.key == "option.tensor_parallel_degree" and source.written is not None:
        return f"{source.written} on this machine"
    for mark in option.marks:
        if isinstance(mark, Deprecated) or (isinstance(mark, DeprecatedValue) and source.raw == mark.value):
            return f"deprecated: {mark.advice}"
        if isinstance(mark, NoEffect):
            return f"no effect: {mark.reason}"
    return ""


def _explain_unknown(found: Inspection | ResolvedModel, unknown: Mapping[str, Source]) -> tuple[ExplainedOption, ...]:
    of_engine = found.engine.argument_names()
    otherwise = "passed on to the handler" if found.spec.runs_user_code else "not an option of this handler"

    def note(key: str) -> str:
        return "passed on to the engine" if key.removeprefix("option.") in of_engine else otherwise

    return tuple(
        ExplainedOption(key, source.raw, source.layer, _place(source), "", "", None, note(key))
        for key, source in unknown.items()
    )


def _devices(found: Inspection) -> tuple[tuple[DeviceSet, ...], tuple[str, ...]]:
    """Return the device sets, or why they cannot be made."""
    accelerator, names = found.spec.devices(found.machine)
    per_worker = found.engine.gpus_per_worker(len(names))
    try:
        return plan_devices(found.serving.load_on_devices, per_worker, names, accelerator), ()
    except ConfigurationError as error:
        return (), (error.message,)


def _environment(found: Inspection) -> tuple[str, ...]:
    """Return a line for each requirement of the environment that the model asks for; nothing if it asks wrongly."""
    try:
        recipe = engine_recipe(found.engine, Path(found.model_dir), found.machine)
    except ConfigurationError:  # a problem of the model, which the inspection has
        return ()
    if recipe is None:
        return ()
    where = "the package index" if recipe.wheelhouse is None else str(recipe.wheelhouse)
    return (*recipe.requirements, f"from {where}, made by uv when the model loads")


def _command(options: ModelOptions, machine: Machine) -> Sequence[str]:
    python = _OWN_ENVIRONMENT if options.has_own_engine else options.own_python or sys.executable
    if options.ranks is not None:
        return mpi_worker_command(python, machine.mpirun or _ANY_MPIRUN, options.ranks, _GROUP_DIRECTORY)
    return worker_command(python, _FD, _FD)


def _rank_environment(options: ModelOptions) -> Mapping[str, str]:
    if options.ranks is None:
        return {}
    variables = RankGroup(options.ranks, _GROUP_DIRECTORY, 0).environment({})
    return {name: value for name, value in variables.items() if name != "MASTER_PORT"}  # a free port of each start


def _memory(needed: Estimate) -> Mapping[str, Any]:
    return {**asdict(needed), "kv_tokens_that_fit": needed.kv_tokens_that_fit}


def _machine(machine: Machine) -> Mapping[str, Any]:
    return {**asdict(machine), "engines": sorted(machine.engines)}


def _memory_warnings(found: Inspection) -> Sequence[str]:
    """Return a warning for each key that requires more memory than the machine has free."""
    missing = shortages(found.serving, found.machine)
    return [f"{found.sources[key].describe(key)}: {text}" for key, text in missing.items()]


def _absent(found: Inspection) -> tuple[Sequence[str], Sequence[str]]:
    """Return errors, one for each missing package of the handler, and warnings.

    A package that the model's requirements.txt may bring is only worth a warning.
    """
    here = not found.options.runs_elsewhere  # what another interpreter has is known when the model loads
    needed = found.engine.packages
    missing = [name for name in needed if here and name not in found.machine.engines]
    if here and is_gguf(found.location) and found.spec.reads_gguf and find_spec("gguf") is None:
        missing.append("gguf")
    command = found.engine.install_command
    install = f"; run: {command}" if command else ""
    lines = [f"{found.spec.title} needs the Python package {name}, which is not installed{install}" for name in missing]
    programs = [NO_MPIRUN] if found.options.ranks is not None and found.machine.mpirun is None else []
    if found.options.has_own_engine:
        programs += missing_uv()
    if found.options.own_python is not None and not _is_program(found.options.python_executable, found.model_dir):
        programs.append(f'option.pythonExecutable = "{found.options.python_executable}": there is no such program')
    devices = _absent_devices(found)
    if Path(found.model_dir, "requirements.txt").is_file():
        return devices, [*lines, *programs]
    return [*lines, *devices], programs


def _absent_devices(found: Inspection) -> Sequence[str]:
    """Return an error if the handler needs a kind of device that this machine does not have."""
    needed = found.engine.device
    if needed in ("", found.machine.device_kind):
        return ()
    return (f"{found.spec.title} needs {_DEVICES[needed]}, and none is visible; serve the model on a machine with one",)


def file_problems(found: Inspection) -> tuple[str, ...]:
    """Return a line for each fault of the model's files, if they are here and are a checkpoint."""
    directory = Path(found.location)
    if found.spec.weights_index is not None:
        index = directory / found.spec.weights_index
        return tuple(pipeline_faults(index)) if index.is_absolute() and index.is_file() else ()
    if found.spec.reads_gguf and is_gguf(found.location) and directory.is_file():
        fault = gguf_fault(directory)
        return () if fault is None else (f"{directory}: {fault}",)
    is_checkpoint = found.spec.reads_checkpoint and bool(found.config) and directory.is_dir()
    if not is_checkpoint or found.sources.get("option.load_format", _ANY_FORMAT).raw == "dummy":  # vLLM's: no weights
        return ()
    if not found.engine.is_plain_checkpoint(directory):
        return ()
    elsewhere = any(key in found.unknown for key in _TOKENIZER_ELSEWHERE)
    return tuple(file_faults(directory, needs_tokenizer=found.spec.formats_text and not elsewhere))

"""Derives values from the model, the machine and other settings: a layer just above the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lmi_server.configuration.handlers import HandlerSpec, HandlerTable, load_options_type
from lmi_server.configuration.layers import Given
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.devices import ALL_DEVICES, NEURON, plan_devices
from lmi_server.machine.inventory import Machine

_BATCH_SIZES = next(option.keys for option in ServingOptions.declared() if option.field == "batch_size")
_DEGREE = "option.tensor_parallel_degree"
# LMI runs a model with adapters or sessions in one worker on the first GPU, but not code that names no model.
_ONE_WORKER_OF_ONE_GPU = ("option.enable_lora", "option.enable_stateful_sessions")
_MPI_MODE = "option.mpi_mode"


def recommend_rolling_batch(names: tuple[str, ...], under_mpi: bool, machine: Machine, handlers: HandlerTable) -> str:
    """Return the value of option.rolling_batch for a model with these architectures (empty: unknown)."""
    suits = _suits_under_mpi if under_mpi else _schedules_itself
    best = next((spec for spec in handlers.specs if suits(spec, names, machine)), handlers.default)
    return best.rolling_batches[0]


def _suits_under_mpi(spec: HandlerSpec, names: tuple[str, ...], machine: Machine) -> bool:
    listed = not names or any(name.startswith(spec.mpi_architectures) for name in names)
    return bool(spec.mpi_architectures) and listed and machine.engines.issuperset(spec.engines)


def _schedules_itself(spec: HandlerSpec, names: tuple[str, ...], machine: Machine) -> bool:
    """Return True if the engine brings its own scheduler and can run here; on a GPU such an engine is fastest."""
    # rolling_batch_decides marks the default handler, which is the fallback and no candidate here.
    own_scheduler = spec.batches_by_default and not spec.needs_mpi and not spec.rolling_batch_decides
    return (
        own_scheduler and spec.handler is not None and bool(machine.gpus) and machine.engines.issuperset(spec.engines)
    )


def recommend(
    spec: HandlerSpec, given: Given, task: str | None, machine: Machine, names_model: bool
) -> Mapping[str, str]:
    """Return values by key. Each is used if no higher layer has a value, or if that value is "auto".

    `task` follows from the model's files; None if they do not say. `names_model`: the directory holds a model's
    config.json, or a key names a model.
    """
    one_worker = _ONE_WORKER_OF_ONE_GPU if names_model or not spec.runs_user_code else ()
    options_type = load_options_type(spec)
    recommended = {**_for_task(spec, given, task), **options_type.recommended(machine)}
    recommended |= _for_handler(spec, given, machine)
    recommended |= _threads(options_type, given, machine)
    if "maxWorkers" not in given:
        recommended |= _max_workers(spec, given, machine, (*one_worker, _MPI_MODE))
    if machine.gpus and any(_says_true(given, key) for key in one_worker):
        recommended |= {"load_on_devices": "0", "maxWorkers": "1"}
    if any(_says_true(given, key) for key in options_type.one_worker_keys):
        recommended["maxWorkers"] = "1"
    return recommended


def _threads(options_type: type[ModelOptions], given: Given, machine: Machine) -> Mapping[str, str]:
    """Return option.threads: the share of the cores that each process of several workers has, or under a quota.

    Libraries start a thread for each core that they see. Where processes have more threads than there are cores, each
    operation waits for threads that have no core, and the workers together are several times as slow as one.
    """
    has_key = any(option.field == "threads" for option in options_type.declared())
    if not has_key or machine.device_kind != "cpu" or machine.omp_threads is not None:
        return {}
    workers = max(_number(given, "minWorkers"), _number(given, "maxWorkers"))
    share = max(1, machine.cores // workers)
    if share >= machine.seen_cores:
        return {}
    return {"option.threads": str(max(1, share // (_number(given, _DEGREE) * _stages(given))))}


def _max_workers(spec: HandlerSpec, given: Given, machine: Machine, one_worker: tuple[str, ...]) -> Mapping[str, str]:
    """Return maxWorkers: as many as minWorkers, and for code of users on the CPU as many as LMI starts under load.

    `one_worker`: keys with which there is one worker.
    """
    asked = given["minWorkers"].raw if "minWorkers" in given else ""
    least = [int(asked)] if asked.isdecimal() else []
    shares_cpu = spec.runs_user_code and machine.device_kind == "cpu"
    if shares_cpu and not any(_says_true(given, key) for key in one_worker):
        least.append(machine.cpu_workers)
    return {"maxWorkers": str(max(1, *least))} if least else {}


def with_max_resolved(known: Given, spec: HandlerSpec, machine: Machine) -> Given:
    """Replace tensor_parallel_degree=max by the number of devices of a worker on this machine.

    On Neuron devices "max" stays if no neuron-ls says how many cores they have.
    """
    source = known.get(_DEGREE)
    if source is None or source.raw.lower() != "max":
        return known
    accelerator, devices = spec.devices(machine)
    if accelerator == NEURON and machine.neuron_devices and not devices:
        return known
    degree = max(1, _devices_of_a_worker(known, devices) // _stages(known))
    return {**known, _DEGREE: replace(source, raw=str(degree), written=source.raw)}


def _devices_of_a_worker(known: Given, names: tuple[str, ...]) -> int:
    devices = known["load_on_devices"].raw if "load_on_devices" in known else ALL_DEVICES
    try:
        return len(plan_devices(devices, None, names)[0].gpus)
    except ConfigurationError:  # the plan that is made for the workers reports it
        return len(names)


def _for_task(spec: HandlerSpec, given: Given, inferred: str | None) -> Mapping[str, str]:
    if not (spec.answers_tasks or spec.batched_tasks):
        return {}
    recommended = {} if inferred is None else {"option.task": inferred}
    asked = given["option.task"].raw if "option.task" in given else "auto"
    task = inferred if asked.lower() == "auto" else asked
    if task in spec.batched_tasks and "batch_size" not in given:
        # A batch of texts costs little more than its longest text alone. There is no delay: the requests that arrived
        # while the last batch ran already make a batch.
        recommended |= {"batch_size": "32", "max_batch_delay": "0"}
    return recommended


def _for_handler(spec: HandlerSpec, given: Given, machine: Machine) -> Mapping[str, str]:
    recommended = {}
    rolling = given.get("option.rolling_batch")
    left_open = spec.batches_by_default if rolling is None else rolling.raw.lower() == "auto"
    if left_open and (spec.answers_tasks or batches_statically(given)):
        recommended["option.rolling_batch"] = "disable"
    elif left_open and spec.rolling_batches:
        recommended["option.rolling_batch"] = spec.rolling_batches[0]
    if spec.takes_all_gpus and machine.gpus:
        recommended[_DEGREE] = str(max(1, len(machine.gpus) // _stages(given)))
    # As with LMI, such a rolling batch means MPI, whatever the engine is called.
    named = rolling is not None and rolling.raw.lower() in spec.rolling_batches
    if spec.needs_mpi and (named or "engine" not in given):
        recommended[_MPI_MODE] = "true"
    return recommended


def batches_statically(given: Given) -> bool:
    """Return True if requests are to be collected to batches that run together from start to end."""
    return any(key in given and given[key].raw not in ("", "1") for key in _BATCH_SIZES)


def _stages(given: Given) -> int:
    return _number(given, "option.pipeline_parallel_degree")


def _number(given: Given, key: str) -> int:
    """Return the value of a key; 1 if it is not set, 0 or no number."""
    source = given.get(key)
    return int(source.raw) if source is not None and source.raw.isdecimal() and int(source.raw) else 1


def _says_true(given: Given, key: str) -> bool:
    return key in given and given[key].is_true

"""Derives values from the model, the machine and other settings: a layer just above the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lmi_server.configuration.choice.deciding_keys import DEGREE, MPI_MODE, ROLLING_BATCH, DecidingKeys
from lmi_server.configuration.engine import load_engine_type
from lmi_server.configuration.handlers import HandlerSpec, HandlerTable, load_options_type
from lmi_server.configuration.layers import Given
from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.devices import NEURON, plan_devices
from lmi_server.machine.inventory import Machine


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
    spec: HandlerSpec, keys: DecidingKeys, task: str | None, machine: Machine, names_model: bool
) -> Mapping[str, str]:
    """Return values by key. Each is used if no higher layer has a value, or if that value is "auto".

    `task` follows from the model's files; None if they do not say. `names_model`: the directory holds a model's
    config.json, or a key names a model.
    """
    options_type = load_options_type(spec)
    # LMI runs a model with adapters or sessions in one worker on the first GPU, but not code that names no model.
    is_model = names_model or not spec.runs_user_code
    one_gpu = is_model and (keys.enable_lora or keys.enable_stateful_sessions)
    recommended = {**_for_task(spec, keys, task), **load_engine_type(spec).recommend(machine)}
    recommended |= _for_handler(spec, keys, machine)
    recommended |= _threads(options_type, keys, machine)
    if keys.max_workers is None:
        recommended |= _max_workers(spec, keys, machine, one_worker=one_gpu or keys.mpi_mode)
    if machine.gpus and one_gpu:
        recommended |= {"load_on_devices": "0", "maxWorkers": "1"}
    sources = map(keys.source, spec.one_worker_keys)
    if any(source is not None and source.is_true for source in sources):
        recommended["maxWorkers"] = "1"
    return recommended


def _for_task(spec: HandlerSpec, keys: DecidingKeys, inferred: str | None) -> Mapping[str, str]:
    if not (spec.answers_tasks or spec.batched_tasks):
        return {}
    recommended = {} if inferred is None else {"option.task": inferred}
    if (keys.task or inferred) in spec.batched_tasks and "batch_size" not in keys.model_fields_set:
        # A batch of texts costs little more than its longest text alone. There is no delay: the requests that arrived
        # while the last batch ran already make a batch.
        recommended |= {"batch_size": "32", "max_batch_delay": "0"}
    return recommended


def _for_handler(spec: HandlerSpec, keys: DecidingKeys, machine: Machine) -> Mapping[str, str]:
    recommended = {}
    rolling = keys.rolling_batch
    left_open = spec.batches_by_default if rolling is None else rolling == "auto"
    if left_open and (spec.answers_tasks or keys.batches_statically):
        recommended[ROLLING_BATCH] = "disable"
    elif left_open and spec.rolling_batches:
        recommended[ROLLING_BATCH] = spec.rolling_batches[0]
    if spec.takes_all_gpus and machine.gpus:
        recommended[DEGREE] = str(max(1, len(machine.gpus) // keys.pipeline_parallel_degree))
    # As with LMI, such a rolling batch means MPI, whatever the engine is called.
    if spec.needs_mpi and (rolling in spec.rolling_batches or keys.engine is None):
        recommended[MPI_MODE] = "true"
    return recommended


def _threads(options_type: type[ModelOptions], keys: DecidingKeys, machine: Machine) -> Mapping[str, str]:
    """Return option.threads: the share of the cores that each process of several workers has, or under a quota.

    Libraries start a thread for each core that they see. Where processes have more threads than there are cores, each
    operation waits for threads that have no core, and the workers together are several times as slow as one.
    """
    if "threads" not in options_type.model_fields or machine.device_kind != "cpu" or machine.omp_threads is not None:
        return {}
    share = max(1, machine.cores // max(1, keys.min_workers or 1, keys.max_workers or 1))
    if share >= machine.seen_cores:
        return {}
    return {"option.threads": str(max(1, share // (keys.degree * keys.pipeline_parallel_degree)))}


def _max_workers(spec: HandlerSpec, keys: DecidingKeys, machine: Machine, one_worker: bool) -> Mapping[str, str]:
    """Return maxWorkers: as many as minWorkers, and for code of users on the CPU as many as LMI starts under load."""
    least = [] if keys.min_workers is None else [keys.min_workers]
    if spec.runs_user_code and machine.device_kind == "cpu" and not one_worker:
        least.append(machine.cpu_workers)
    return {"maxWorkers": str(max(1, *least))} if least else {}


def with_max_resolved(known: Given, spec: HandlerSpec, machine: Machine) -> Given:
    """Replace tensor_parallel_degree=max by the number of devices of a worker on this machine.

    On Neuron devices "max" stays if no neuron-ls says how many cores they have.
    """
    keys = DecidingKeys.from_given(known)
    if keys.tensor_parallel_degree != "max":
        return known
    accelerator, devices = spec.devices(machine)
    if accelerator == NEURON and machine.neuron_devices and not devices:
        return known
    try:
        count = len(plan_devices(keys.load_on_devices, None, devices)[0].gpus)
    except ConfigurationError:  # the plan that is made for the workers reports it
        count = len(devices)
    source, degree = known[DEGREE], max(1, count // keys.pipeline_parallel_degree)
    return {**known, DEGREE: replace(source, raw=str(degree), written=source.raw)}

"""What the pool of a model is started with, from the model's configuration and this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.contract.errors import ConfigurationError, ModelLoadError
from lmi_server.contract.protocol import Load
from lmi_server.machine.devices import plan_devices
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine
from lmi_server.machine.mpi import NO_MPIRUN, find_mpirun
from lmi_server.serving.adapters.adapters import RegisteredAdapter, adapters_in
from lmi_server.serving.models.fetch_model import FetchedModel
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.supervisor.worker_process import MpiLauncher

logger = logging.getLogger(__name__)

_ADAPTERS_AT_HAND = 8  # of a worker that has all: a batch with few of them is computed faster


def plan_pool(
    source: ModelSource, fetched: FetchedModel, environment: Mapping[str, str], log_levels: Mapping[str, str]
) -> PoolSettings:
    """Return what the workers of a model are started with.

    `environment` has the variables that configure models, `log_levels` the level of each logger that has one, "" the
    level of all others. Raises ConfigurationError for devices that the machine has not, ModelLoadError without an
    mpirun if the model needs one.
    """
    resolved = fetched.resolved
    serving, options = resolved.serving, resolved.options
    accelerator, devices = resolved.spec.devices(this_machine(environment))
    return PoolSettings(
        load=Load(
            model_name=resolved.name,
            model_dir=resolved.model_dir,
            handler=resolved.handler,
            options=resolved.options.dump(),
            options_type=resolved.spec.options,
            passed_through=dict(resolved.options.passed_through),
            served_names=list(resolved.served_names),
            log_level=log_levels[""],
            log_levels={name: level for name, level in log_levels.items() if name},
            batch_size=serving.batch_size,
            memory_limit_mb=serving.max_worker_memory_mb,
        ),
        version=source.version,
        device_sets=plan_devices(
            serving.load_on_devices, resolved.engine.gpus_per_worker(len(devices)), devices, accelerator
        ),
        python=fetched.python,
        engine_environment=fetched.environment,
        environment=_worker_variables(resolved.worker_environment, fetched),
        socket_directory=_socket_directory(resolved),
        mpi=None if options.ranks is None else _mpi_launcher(options.ranks, environment),
        adapters=_adapters_beside(source, resolved),
        min_workers=serving.min_workers,
        max_workers=max(serving.min_workers, serving.max_workers),
        max_in_flight=options.max_rolling_batch_size,
        max_batch_delay_s=serving.max_batch_delay / 1000,
        job_queue_size=serving.job_queue_size,
        max_queue_delay_s=None if options.max_queue_delay_ms is None else options.max_queue_delay_ms / 1000,
        model_loading_timeout_s=options.model_loading_timeout,
        predict_timeout_s=options.predict_timeout,
        max_idle_s=serving.max_idle_time,
        parallel_loading=options.parallel_loading,
        retry_threshold=serving.retry_threshold,
        quarantine_s=serving.quarantine_time,
        sessions=resolved.has_sessions or resolved.engine.keeps_prefixes,
        prefix_affinity=resolved.engine.keeps_prefixes,
        adapter_affinity=options.adapters_on_demand or (_ADAPTERS_AT_HAND if options.enable_lora else 0),
    )


def _socket_directory(resolved: ResolvedModel) -> str:
    """Return the variable for the directory of the engine's sockets, "" if there is none or the user has set it."""
    variable = resolved.engine.socket_directory
    return "" if variable in {**process_environment(), **resolved.worker_environment} else variable


def _mpi_launcher(ranks: int, environment: Mapping[str, str]) -> MpiLauncher:
    mpirun = find_mpirun(environment)
    if mpirun is None:
        raise ModelLoadError(NO_MPIRUN)
    logger.info("%s %s starts %d ranks: %s", mpirun.implementation, mpirun.version, ranks, mpirun.path)
    return MpiLauncher(mpirun, ranks)


def refuse_adapters_without_lora(settings: PoolSettings, resolved: ResolvedModel) -> None:
    """Raise ConfigurationError if calls have registered adapters, and the model takes none any more."""
    if settings.adapters and not resolved.options.enable_lora:
        names = ", ".join(sorted(registered.name for registered in settings.adapters))
        raise ConfigurationError(
            f"option.enable_lora is not true any more, and adapters are registered: {names}; unregister them first"
        )


def _adapters_beside(source: ModelSource, resolved: ResolvedModel) -> tuple[RegisteredAdapter, ...]:
    """Return the adapters in the directories of the model and of its weights, if LoRA is enabled."""
    options = resolved.options
    places = dict.fromkeys([resolved.model_dir, *([options.model_id] if options.model_id else [])])
    adapters = adapters_in([Path(place, options.adapters) for place in places])
    if adapters and not options.enable_lora:
        names = ", ".join(registered.name for registered in adapters)
        logger.warning("model %s: adapters %s are not served; set option.enable_lora=true", source.label, names)
        return ()
    return adapters


def _worker_variables(own: Mapping[str, str], fetched: FetchedModel) -> dict[str, str]:
    """Return a model's `own` variables with a PYTHONPATH on which what it needs comes first.

    An environment of its own gets no packages from the PYTHONPATH of the server.
    """
    if not fetched.python_path:
        return dict(own)
    inherited = own.get("PYTHONPATH")
    if fetched.environment is None:
        inherited = inherited or process_environment().get("PYTHONPATH")
    return {**own, "PYTHONPATH": os.pathsep.join([*fetched.python_path, *([inherited] if inherited else [])])}

"""What the pool of a model is told, and the words for its state."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from lmi_server.contract.protocol import Load
from lmi_server.machine.devices import DeviceSet
from lmi_server.serving.adapters import RegisteredAdapter
from lmi_server.supervisor.worker_process import MpiLauncher


class ModelStatus(Enum):
    """The words are those of LMI's `/ping`."""

    PENDING = "PENDING"
    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    FAILED = "FAILED"


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool needs to know of a model. Times are in seconds; numbers of workers are those of each device set.

    `version` tells the versions of one model apart. `environment` is added to that of each worker; with an
    `mpi` launcher each worker is a group of ranks.
    """

    load: Load
    version: str | None = None
    device_sets: tuple[DeviceSet, ...] = (DeviceSet(),)
    environment: Mapping[str, str] = {}
    mpi: MpiLauncher | None = None
    adapters: tuple[RegisteredAdapter, ...] = ()
    min_workers: int = 1
    max_workers: int = 1
    max_in_flight: int = 32
    max_batch_delay_s: float = 0.1
    job_queue_size: int = 1000
    model_loading_timeout_s: float = 240.0
    predict_timeout_s: float = 120.0
    max_idle_s: float = 60.0
    heartbeat_timeout_s: float = 30.0
    parallel_loading: bool = False
    retry_threshold: int = 10
    death_window_s: float = 600.0

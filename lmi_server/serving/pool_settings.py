"""What the pool of a model is started with, and the words for its state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum

import msgspec

from lmi_server.artifacts.environments.environment import EngineEnvironment
from lmi_server.contract.protocol import Load
from lmi_server.machine.devices import DeviceSet
from lmi_server.serving.adapters.adapters import RegisteredAdapter
from lmi_server.supervisor.worker_process import MpiLauncher


class ModelStatus(Enum):
    """The words of LMI's `/ping`, from the best state to the worst."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    PENDING = "PENDING"
    FAILED = "FAILED"


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool needs to know of a model. Times are in seconds; numbers of workers count for each device set.

    With `sessions` the requests of a session go to one worker. With `prefix_affinity` a request goes to a worker that
    had one with the same beginning. `adapter_affinity` is the number of adapters that a worker has at hand; above 0, a
    request goes to a worker that had one for the same adapter.

    `version` distinguishes the versions of one model. `python` is the interpreter of the workers, and
    `engine_environment` what it belongs to if the model has an engine of its own. `environment` is added to that of
    each worker, and the variable `socket_directory`, if there is one, gets a directory of the worker's own. With an
    `mpi` launcher each worker is a group of ranks. What a user may configure has no default here:
    `ServingOptions` and `ModelOptions` have the defaults.

    The successor of a pool also gets what calls have changed there. `bounds` has the minimum and the maximum of workers
    by the first device of a set; `own_adapters` are in the model's directory, if `adapters` differ from them. No worker
    gets a number of `reserved_numbers`, which workers of the old pool have.
    """

    load: Load
    version: str | None = None
    device_sets: tuple[DeviceSet, ...] = (DeviceSet(),)
    python: str = sys.executable
    engine_environment: EngineEnvironment | None = None
    environment: Mapping[str, str] = {}
    socket_directory: str = ""
    mpi: MpiLauncher | None = None
    adapters: tuple[RegisteredAdapter, ...] = ()
    own_adapters: tuple[RegisteredAdapter, ...] | None = None
    min_workers: int
    max_workers: int
    bounds: Mapping[int, tuple[int, int]] = {}
    reserved_numbers: frozenset[int] = frozenset()
    max_in_flight: int
    max_batch_delay_s: float
    job_queue_size: int
    max_queue_delay_s: float | None
    model_loading_timeout_s: float
    predict_timeout_s: float
    max_idle_s: float
    parallel_loading: bool
    retry_threshold: int
    quarantine_s: float
    sessions: bool = False
    prefix_affinity: bool = False
    adapter_affinity: int = 0
    heartbeat_timeout_s: float = 30.0
    death_window_s: float = 600.0

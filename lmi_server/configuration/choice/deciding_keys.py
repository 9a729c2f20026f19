"""The keys that decide which handler serves a model, and the recommendations for it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, PrivateAttr

from lmi_server.configuration.declaration import Key, Options
from lmi_server.configuration.layers import Given, Source, build
from lmi_server.configuration.options import (
    OWN_PYTHON,
    Count,
    ParallelDegree,
    PositiveInt,
    Workers,
    WorkersOrZero,
    lower,
)
from lmi_server.machine.devices import ALL_DEVICES

ENTRY_POINT = "option.entryPoint"
ROLLING_BATCH = "option.rolling_batch"
MPI_MODE = "option.mpi_mode"
MODEL_ID = "option.model_id"
DEGREE = "option.tensor_parallel_degree"


def _unless_auto(value: Any) -> Any:
    return None if lower(value) == "auto" else value


class DecidingKeys(Options):
    """Typed values of these keys, before the options class of the handler is known.

    A wrong value counts as not given here. It is reported once the handler's class has checked it.
    """

    engine: Annotated[str | None, Key(also=("option.engine",))] = None
    entry_point: Annotated[str | None, Key(ENTRY_POINT)] = None
    handler: Annotated[str | None, Key("option.handler")] = None
    model_id: Annotated[str | None, Key(MODEL_ID)] = None
    task: Annotated[str | None, BeforeValidator(_unless_auto), Key("option.task")] = None
    rolling_batch: Annotated[str | None, BeforeValidator(lower), Key(ROLLING_BATCH)] = None
    mpi_mode: Annotated[bool, Key(MPI_MODE)] = False
    tensor_parallel_degree: Annotated[ParallelDegree, Key(DEGREE)] = 1
    pipeline_parallel_degree: Annotated[PositiveInt, Key("option.pipeline_parallel_degree")] = 1
    max_model_len: Annotated[PositiveInt | None, Key("option.max_model_len")] = None
    engine_version: Annotated[str | None, Key("option.engine_version")] = None
    engine_requirements: Annotated[str | None, Key("option.engine_requirements")] = None
    python_executable: Annotated[str, Key("option.pythonExecutable")] = OWN_PYTHON
    quantize: Annotated[str | None, BeforeValidator(lower), Key("option.quantize")] = None
    dtype: Annotated[str | None, BeforeValidator(lower), Key("option.dtype", also=("option.data_type",))] = None
    use_stable_diffusion: Annotated[bool, Key("option.use_stable_diffusion")] = False
    enable_lora: Annotated[bool, Key("option.enable_lora")] = False
    enable_stateful_sessions: Annotated[bool, Key("option.enable_stateful_sessions")] = False
    batch_size: Annotated[Count, Key(also=("max_dynamic_batch_size",))] = 1
    min_workers: Annotated[WorkersOrZero | None, Key("minWorkers")] = None
    max_workers: Annotated[Workers | None, Key("maxWorkers")] = None
    load_on_devices: str = ALL_DEVICES

    _sources: Given = PrivateAttr(default_factory=dict)

    @classmethod
    def from_given(cls, given: Given) -> DecidingKeys:
        """Read the keys from merged layers."""
        keys, _ = build(cls, given)
        keys._sources = given
        return keys

    def source(self, key: str) -> Source | None:
        """Return where the value of a key, in full, comes from; None if no layer has one."""
        return self._sources.get(key)

    @property
    def batches_statically(self) -> bool:
        """Whether requests are collected to batches that run together from start to end."""
        return self.batch_size > 1

    @property
    def quantises_to_8_bits(self) -> bool:
        """Whether weights are quantised to 8 bits while they load, by LMI-Dist's names for it.

        It is false for a model with packages of its own: what the server's vLLM lacks says nothing of them.
        """
        if (self.engine_version, self.engine_requirements, self.python_executable) != (None, None, OWN_PYTHON):
            return False
        return self.dtype == "int8" or self.quantize in ("bitsandbytes", "bitsandbytes8")

    @property
    def degree(self) -> int:
        """The tensor parallel degree; 1 if it follows from the devices."""
        return 1 if self.tensor_parallel_degree == "max" else max(1, self.tensor_parallel_degree)

"""The options of DJL's engines that run in Java: PyTorch, OnnxRuntime, TensorFlow, XGBoost, Triton, Rust."""

from __future__ import annotations

from typing import Annotated, Literal

from lmi_server.configuration.declaration import Key
from lmi_server.configuration.options import ModelOptions, NonNegativeInt
from lmi_server.configuration.references import NAMES_NOTHING, NAMES_PATH


class JavaEngineOptions(ModelOptions):
    """Keys of serving.properties for a model that one of DJL's Java engines runs."""

    rolling_batch: Literal["disable", "auto"] = "disable"
    """Iteration-level batching does not apply to these engines."""
    map_location: Annotated[bool, Key("mapLocation")] = False
    """Load weights directly onto the device."""
    extra_files: Annotated[str | None, Key("extraFiles"), NAMES_PATH] = None
    """Further files of the model."""
    inter_op_threads: Annotated[NonNegativeInt, Key("interOpNumThreads")] = 0
    """Threads that run operations concurrently; 0 lets the engine choose."""
    intra_op_threads: Annotated[NonNegativeInt, Key("intraOpNumThreads")] = 0
    """Threads inside one operation; 0 lets the engine choose."""
    execution_mode: Annotated[Literal["SEQUENTIAL", "PARALLEL"], Key("executionMode")] = "SEQUENTIAL"
    """How ONNX Runtime runs operations."""
    optimization_level: Annotated[Literal["NO_OPT", "BASIC_OPT", "EXTENDED_OPT", "ALL_OPT"], Key("optLevel")] = (
        "ALL_OPT"
    )
    """How far ONNX Runtime optimises the graph."""
    memory_pattern_optimization: Annotated[bool, Key("memoryPatternOptimization")] = True
    """Reuse the memory plan of the first run."""
    cpu_arena_allocator: Annotated[bool, Key("cpuArenaAllocator")] = True
    """Keep freed memory for reuse."""
    disable_per_session_threads: Annotated[bool, Key("disablePerSessionThreads")] = False
    """Share threads between models."""
    custom_op_library: Annotated[str | None, Key("customOpLibrary"), NAMES_PATH] = None
    """Library of custom operations."""
    ort_device: Annotated[str | None, Key("ortDevice"), NAMES_NOTHING] = None
    """Execution provider of ONNX Runtime."""

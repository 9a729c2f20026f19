"""The options of LMI's engines that are written in Java: PyTorch, OnnxRuntime, TensorFlow, XGBoost, Triton, Rust."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmi_server.configuration.declaration import Key
from lmi_server.configuration.options import ModelOptions, NonNegativeInt


class JavaEngineOptions(ModelOptions):
    """Keys of serving.properties for a model that is no Python code."""

    rolling_batch: Literal["disable", "auto"] = Field("disable", description="There are no tokens to batch by.")
    map_location: Annotated[bool, Key("mapLocation")] = Field(
        False, description="Load weights onto the device at once."
    )
    extra_files: Annotated[str | None, Key("extraFiles")] = Field(None, description="Further files of the model.")
    inter_op_threads: Annotated[NonNegativeInt, Key("interOpNumThreads")] = Field(
        0, description="Threads that run operations side by side; 0 is the engine's choice."
    )
    intra_op_threads: Annotated[NonNegativeInt, Key("intraOpNumThreads")] = Field(
        0, description="Threads inside one operation; 0 is the engine's choice."
    )
    execution_mode: Annotated[Literal["SEQUENTIAL", "PARALLEL"], Key("executionMode")] = Field(
        "SEQUENTIAL", description="How ONNX Runtime runs operations."
    )
    optimization_level: Annotated[Literal["NO_OPT", "BASIC_OPT", "EXTENDED_OPT", "ALL_OPT"], Key("optLevel")] = Field(
        "ALL_OPT", description="How far ONNX Runtime optimises the graph."
    )
    memory_pattern_optimization: Annotated[bool, Key("memoryPatternOptimization")] = Field(
        True, description="Plan memory by the pattern of the first run."
    )
    cpu_arena_allocator: Annotated[bool, Key("cpuArenaAllocator")] = Field(True, description="Keep memory for reuse.")
    disable_per_session_threads: Annotated[bool, Key("disablePerSessionThreads")] = Field(
        False, description="Share threads between models."
    )
    custom_op_library: Annotated[str | None, Key("customOpLibrary")] = Field(
        None, description="Library of operations of one's own."
    )
    ort_device: Annotated[str | None, Key("ortDevice")] = Field(None, description="Execution provider of ONNX Runtime.")

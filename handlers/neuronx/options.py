"""The options of the transformers_neuronx handler; importable without Neuron's libraries."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key, NoEffect, Unavailable
from lmi_server.configuration.engine import EngineDescription, EngineMemory, without_keys
from lmi_server.configuration.options import (
    LONG_DTYPES,
    Lengths,
    ModelOptions,
    ParallelDegree,
    PositiveInt,
    lower,
    short_dtype,
)
from lmi_server.configuration.references import NAMES_DRAFT, NAMES_MODEL, NAMES_NOTHING, NAMES_PATH
from lmi_server.configuration.tasks import Workload

AMP: Mapping[str, str] = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
"""What transformers-neuronx calls the data types of option.dtype."""

CHECKPOINT, COMPILED = "checkpoint", "compiled"
"""LMI's names for the directories of the weights and the graphs of a model that was compiled ahead of time."""
SPLIT_WEIGHTS = "pytorch_model.bin"
"""A directory with a file for each weight, where other checkpoints have a file of this name."""
COMPILED_BY_OPTIMUM = "neuron_config.json"
"""A file of each model that optimum-neuron has compiled."""

_OF_AMP = {amp: dtype for dtype, amp in AMP.items()}
NeuronDtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(lambda value: _OF_AMP.get(value, short_dtype(value))),
    Allowed("fp32 (float32), fp16 (float16), bf16 (bfloat16)"),
]
Layout = Literal["BSH", "HSB", "SBH"]
TensorDtype = Literal["float32", "float16", "bfloat16"]

# Keys by which LMI chooses transformers-neuronx to load the model. optimum-neuron has the last two as well.
_NEEDS_TNX = (
    "collectives_layout",
    "on_device_embedding",
    "load_in_8bit",
    "quantize",
    "load_split_model",
    "compiled_graph_path",
)
_SIGNS_OF_TNX = (*_NEEDS_TNX, "fuse_qkv", "context_length_estimate")
# Arguments of transformers-neuronx' NeuronConfig by the same names.
_NEURON_CONFIG = (
    "group_query_attention",
    "fuse_qkv",
    "on_device_embedding",
    "collectives_layout",
    "attention_layout",
    "cache_layout",
    "all_reduce_dtype",
    "cast_logits_dtype",
    "sequence_parallel_norm_threshold",
    "shard_over_sequence",
    "compilation_worker_count",
    "fuse_mlp",
    "fused_rmsnorm_qkv",
    "qkv_tiling",
    "weight_tiling",
    "mlp_out_weight_transpose",
)
# Keys without effect on optimum-neuron, which gives its compiler flags of its own.
_OF_TNX = (
    *(name for name in _NEURON_CONFIG if name != "fuse_qkv"),
    *("unroll", "load_in_8bit", "quantize", "low_cpu_mem_usage", "load_split_model", "sequence_parallel"),
    *("neuron_optimize_level", "enable_mixed_precision_accumulation", "enable_saturate_infinity"),
    *("neuron_cc_pipeline_factor",),
)
_PACKAGES = {"tnx": "transformers-neuronx", "optimum": "optimum-neuron[neuronx]"}
_INDEX = "from Neuron's own package index"
_ON_HOST = "remove it: the scheduler samples on the host, by the parameters of each request"
_NO_DRAFT = (
    "remove it, or set option.rolling_batch=vllm, which takes option.speculative_draft_model: the scheduler decodes one"
    " token per step and sequence"
)
_NO_DRAFTING = NoEffect("only option.rolling_batch=vllm takes a draft model")


def _graph_path(text: str | None) -> str | None:
    if text is not None and not text.startswith("s3://") and not os.path.isdir(text):
        raise ValueError("no such directory")
    return text


def tnx_is_installed() -> bool:
    """Return whether transformers-neuronx is here; what PyPI has of that name is a placeholder without modules."""
    spec = find_spec("transformers_neuronx")
    return spec is not None and any(
        (Path(place) / "config.py").is_file() for place in spec.submodule_search_locations or ()
    )


def holds_graphs(directory: Path) -> bool:
    """Return whether a directory holds compiled graphs themselves; the compiler's cache has them in subdirectories."""
    return any(directory.glob("*.neff"))


def runs_on_vllm(workload: Workload) -> bool:
    """Return whether option.rolling_batch leaves the model to vLLM, which Neuron's plugin brings to the device."""
    return workload.rolling_batch == "vllm"


class NeuronxOptions(ModelOptions):
    """Keys of serving.properties for a model on AWS Inferentia and Trainium."""

    tensor_parallel_degree: ParallelDegree = 1
    """Neuron cores that one model is split over."""
    rolling_batch: Annotated[
        Literal["auto", "scheduler", "disable", "vllm"],
        BeforeValidator(lower),
    ] = "disable"
    """Iteration-level batching with max_rolling_batch_size lines of the KV cache; disable computes one request after
    the other, vllm leaves the model to vLLM with its plugin for Neuron."""
    dtype: Annotated[NeuronDtype, Key(also=("option.data_type", "option.amp"))] = "fp16"
    """Data type of weights and KV cache."""
    task: Annotated[
        str | None,
        Unavailable(lambda task: task not in (None, "text-generation", "auto"), "use text-generation"),
        NAMES_NOTHING,
    ] = None
    """Task of the model by its Hugging Face name; only text generation is served."""
    n_positions: PositiveInt = 128
    """Maximum number of tokens of prompt and output together."""
    load_in_8bit: bool = False
    """Quantise the weights to 8 bits."""
    unroll: Annotated[str | None, Field(pattern=r"^[1-9]\d*$"), Allowed("an integer of 1 or more"), NAMES_NOTHING] = (
        None
    )
    """Number of layers per compiled graph; without it the compiler chooses."""
    neuron_optimize_level: Annotated[
        Literal["1", "2", "3"] | None, Documented("2", "none; the compiler then uses 2")
    ] = None
    """Optimisation level of the compiler; a higher one compiles longer and runs faster."""
    context_length_estimate: Lengths | None = None
    """Prompt lengths for which graphs are compiled; if not set, powers of 2 from 128 up to n_positions. The tokens of a
    prompt behind the longest of them are computed one by one."""
    low_cpu_mem_usage: bool = False
    """Load weights one by one instead of taking twice the model's memory."""
    load_split_model: bool = False
    """The checkpoint has been split for Neuron (a directory pytorch_model.bin)."""
    compiled_graph_path: Annotated[
        str | None, AfterValidator(_graph_path), Allowed("s3://bucket/prefix, or a directory that exists"), NAMES_MODEL
    ] = None
    """Directory of compiled graphs (*.neff), or directory or s3:// address of the Neuron compiler's cache; if not set,
    the graphs in the model directory or its directory compiled."""
    group_query_attention: (
        Literal["shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"] | None
    ) = None
    """How to split the KV cache of grouped-query attention."""
    enable_mixed_precision_accumulation: Annotated[
        bool, Documented(None, "without the key it is false; LMI's code treats even false as true")
    ] = False
    """Accumulate in fp32."""
    enable_saturate_infinity: bool = False
    """Replace infinities by the largest finite number."""
    quantize: Literal["static_int8"] | None = None
    """Quantisation of the weights; same as load_in_8bit."""
    save_mp_checkpoint_path: Annotated[str | None, NAMES_PATH] = None
    """Directory to which the model is written, split by core."""
    model_loader: Literal["tnx", "optimum"] | None = None
    """Library that loads the model; if not set, optimum-neuron, or transformers-neuronx (tnx) where it is installed."""
    rolling_batch_strategy: Literal["continuous_batching", "naive_rolling_batch"] | None = None
    """How a new request joins the batch; without it continuous_batching for Llama and Mistral."""
    fuse_qkv: bool = False
    """Compute queries, keys and values in one operation."""
    on_device_embedding: bool = False
    """Look embeddings up on the device."""
    collectives_layout: Layout | None = None
    """Layout of collective operations."""
    partition_schema: Literal["legacy", "optimum", "safetensors", "compile_only"] | None = None
    """Format in which a compiled model is saved."""
    draft_model_compiled_path: Annotated[
        str | None, Unavailable(lambda path: path is not None, _NO_DRAFT), NAMES_MODEL
    ] = None
    """Compiled graph of the draft model."""
    speculative_draft_model: Annotated[
        str | None, Unavailable(lambda name: name is not None, _NO_DRAFT), NAMES_DRAFT
    ] = None
    """Model that drafts tokens for speculative decoding."""
    speculative_length: Annotated[PositiveInt, _NO_DRAFTING] = 5
    """Number of tokens that the draft model proposes."""
    draft_model_tp_size: Annotated[PositiveInt | None, _NO_DRAFTING] = None
    """Neuron cores of the draft model."""
    fuse_mlp: bool = False
    """Fuse the MLP."""
    fused_rmsnorm_qkv: bool = False
    """Fuse the norm with queries, keys and values."""
    qkv_tiling: bool = False
    """Tile the weights of queries, keys and values."""
    weight_tiling: bool = False
    """Tile the weights of the MLP."""
    mlp_out_weight_transpose: bool = False
    """Transpose the output weights of the MLP."""
    attention_layout: Literal["HSB", "BSH"] | None = None
    """Layout of attention."""
    cache_layout: Literal["SBH", "BSH"] | None = None
    """Layout of the KV cache."""
    all_reduce_dtype: TensorDtype | None = None
    """Data type of all-reduce."""
    cast_logits_dtype: TensorDtype | None = None
    """Data type of logits."""
    sequence_parallel_norm_threshold: PositiveInt | None = None
    """Number of tokens from which norms use sequence parallelism."""
    on_device_generation: Annotated[str | None, Unavailable(lambda path: path is not None, _ON_HOST), NAMES_PATH] = None
    """File with the sampling parameters of all requests, to sample on the device."""
    shard_over_sequence: bool = False
    """Split the KV cache along the sequence."""
    compilation_worker_count: PositiveInt | None = None
    """Number of processes that compile."""
    sequence_parallel: bool = False
    """Split the norms of long prompts along the sequence (sequence_parallel_norm)."""
    multi_node: Annotated[bool, Unavailable.values(True, instead="use one machine")] = False
    """Spread the model over several machines."""
    neuron_cc_pipeline_factor: PositiveInt | None = None
    """Pipeline factor of the compiler."""
    neuron_quant: Annotated[bool, Unavailable.values(True, instead="use option.quantize=static_int8")] = False
    """Quantise as vLLM on Neuron does."""
    use_stable_diffusion: bool = False
    """The model is a pipeline of diffusers, which another handler of Neuron serves."""
    height: Annotated[PositiveInt, NoEffect("it is for images")] = 512
    """Height of images in pixels."""
    width: Annotated[PositiveInt, NoEffect("it is for images")] = 512
    """Width of images in pixels."""
    num_images_per_prompt: Annotated[PositiveInt, NoEffect("it is for images")] = 1
    """Number of images for each prompt."""
    use_auth_token: Annotated[str | None, NoEffect("the server downloads models, with HF_TOKEN"), NAMES_NOTHING] = None
    """Token for gated models of Hugging Face."""

    @property
    def lines(self) -> int:
        """How many sequences the graphs decode together."""
        return 1 if self.rolling_batch == "disable" else self.max_rolling_batch_size

    @property
    def degree(self) -> int:
        """How many Neuron cores the model is split over; "max" is resolved on a machine whose cores are known."""
        return 1 if self.tensor_parallel_degree == "max" else max(1, self.tensor_parallel_degree)

    @property
    def loader(self) -> Literal["tnx", "optimum"] | None:
        """The package that the options ask for; None if the model decides between two that are installed.

        transformers-neuronx is no longer developed, so optimum-neuron is the default where it is not installed.
        """
        if self.model_loader is not None:
            return self.model_loader
        installed = tnx_is_installed()
        if self.model_fields_set.intersection(_SIGNS_OF_TNX if installed else _NEEDS_TNX):
            return "tnx"
        if self.partition_schema is not None:
            return "optimum" if self.partition_schema == "optimum" else "tnx"
        return None if installed else "optimum"

    @property
    def needs_tnx(self) -> tuple[str, ...]:
        """Return the keys in full that are given, and that transformers-neuronx alone has."""
        return tuple(f"option.{name}" for name in _NEEDS_TNX if name in self.model_fields_set)

    def prompt_buckets(self) -> tuple[int, ...]:
        """Return the prompt lengths that graphs are compiled for."""
        if self.context_length_estimate is not None:
            return tuple(sorted(self.context_length_estimate))
        if self.cache_layout == "BSH":  # it allows no more than one
            return (self.n_positions,)
        sizes = [1 << power for power in range(7, self.n_positions.bit_length()) if 1 << power < self.n_positions]
        return (*sizes, self.n_positions)

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of the library that loads the model.

        These are those of transformers-neuronx' `NeuronAutoModelForCausalLM.from_pretrained`, or of optimum-neuron's
        `NxDNeuronConfig`.
        """
        return self.optimum_arguments() if self.loader == "optimum" else self.tnx_arguments()

    def tnx_arguments(self) -> Mapping[str, Any]:
        """Return the arguments for transformers-neuronx; `neuron_config` is a mapping of those of its NeuronConfig."""
        arguments = {
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code or None,
            "low_cpu_mem_usage": self.low_cpu_mem_usage or None,
            "amp": AMP[self.dtype],
            "tp_degree": self.degree,
            "n_positions": self.n_positions,
            "unroll": None if self.unroll is None else int(self.unroll),
            "context_length_estimate": list(self.prompt_buckets()),
            "batch_size": self.lines,
            "neuron_config": self._neuron_config(),
        }
        return {name: value for name, value in arguments.items() if value is not None}

    def _neuron_config(self) -> Mapping[str, Any]:
        given = {name: value for name in _NEURON_CONFIG if (value := getattr(self, name))}
        if self.load_split_model:  # as with LMI
            given["on_device_embedding"] = True
        if self.sequence_parallel or self.sequence_parallel_norm_threshold:
            given["sequence_parallel_norm"] = True
        if self.load_in_8bit or self.quantize:
            given["quant"] = {"quant_dtype": "s8", "dequant_dtype": AMP[self.dtype]}
        return given

    def optimum_arguments(self) -> Mapping[str, Any]:
        """Return the arguments for optimum-neuron."""
        arguments = {
            "batch_size": self.lines,
            "continuous_batching": self.lines > 1,
            "sequence_length": self.n_positions,
            "max_context_length": self.prompt_buckets()[-1],
            "tp_degree": self.degree,
            "torch_dtype": LONG_DTYPES[self.dtype],
            "on_device_sampling": False,
        }
        return arguments | ({"fused_qkv": True} if self.fuse_qkv else {})

    def compiler_flags(self) -> tuple[str, ...]:
        """Return what these options add to the flags of the Neuron compiler (NEURON_CC_FLAGS)."""
        flags = {
            f"-O{self.neuron_optimize_level}": self.neuron_optimize_level,
            "--enable-mixed-precision-accumulation": self.enable_mixed_precision_accumulation,
            "--enable-saturate-infinity": self.enable_saturate_infinity,
            f"--tensorizer-options='--cc-pipeline-tiling-factor={self.neuron_cc_pipeline_factor}'": (
                self.neuron_cc_pipeline_factor
            ),
        }
        return tuple(flag for flag, wanted in flags.items() if wanted)

    def context_length(self) -> int | None:
        return self.n_positions

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        key = ("option.partition_schema",)
        if self.loader == "tnx" and self.partition_schema == "optimum":
            yield Conflict(key, "optimum only with option.model_loader=optimum")
        if self.model_loader == "optimum" and self.partition_schema not in (None, "optimum"):
            yield Conflict(key, "optimum with option.model_loader=optimum")
        if max(self.prompt_buckets()) > self.n_positions:
            yield Conflict(
                ("option.context_length_estimate", "option.n_positions"),
                f"lengths of at most option.n_positions={self.n_positions}",
            )
        if self.qkv_tiling and not self.fuse_qkv:
            yield Conflict(("option.qkv_tiling", "option.fuse_qkv"), "true only with option.fuse_qkv=true")
        if self.shard_over_sequence and self.cache_layout not in (None, "SBH"):
            yield Conflict(("option.shard_over_sequence", "option.cache_layout"), "true only with cache_layout=SBH")
        if self.cache_layout == "BSH" and self.prompt_buckets() != (self.n_positions,):
            yield Conflict(
                ("option.cache_layout", "option.context_length_estimate"),
                f"BSH only with option.context_length_estimate={self.n_positions}, the value of option.n_positions",
            )

    def _only_of_tnx(self) -> Iterator[str]:
        """Yield the keys whose values do nothing for optimum-neuron."""
        yield from _OF_TNX
        if self.rolling_batch_strategy == "naive_rolling_batch":
            yield "rolling_batch_strategy"
        if self.compiled_graph_path is not None and holds_graphs(Path(self.compiled_graph_path)):
            yield "compiled_graph_path"

    def warnings(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.loader == "optimum":
            for key in (f"option.{name}" for name in self._only_of_tnx()):
                if key in given:
                    yield Conflict(
                        (key,),
                        "has no effect on optimum-neuron, only on transformers-neuronx (option.model_loader=tnx)",
                    )
        continuous = self.rolling_batch_strategy == "continuous_batching"
        if continuous and self.rolling_batch == "disable":
            yield Conflict(("option.rolling_batch_strategy",), "has no effect with option.rolling_batch=disable")


class NeuronxMemory(EngineMemory[NeuronxOptions]):
    """What a model on Neuron cores keeps of its requests."""

    def max_running(self) -> int:
        return self.options.lines


class NeuronxEngine(EngineDescription[NeuronxOptions]):
    """optimum-neuron, or transformers-neuronx where it is installed or the options need it."""

    memory_type = NeuronxMemory

    @property
    def packages(self) -> tuple[str, ...]:
        return self.spec.alternatives if self.options.loader in ("tnx", None) else self.spec.engines

    @property
    def install_command(self) -> str:
        loader = self.options.loader
        command = self.spec.installed_by if loader is None else f"pip install {_PACKAGES[loader]}, {_INDEX}"
        needing = ", ".join(self.options.needs_tnx)
        return f"{command}; or remove {needing} for optimum-neuron" if loader == "tnx" and needing else command

    def worker_environment(self) -> Mapping[str, str]:
        flags = self.options.compiler_flags()
        cache = self.options.compiled_graph_path
        is_cache = cache is not None and not holds_graphs(Path(cache))
        return {
            **({"NEURON_CC_FLAGS": " ".join(flags)} if flags else {}),
            **({"NEURON_COMPILE_CACHE_URL": cache} if cache is not None and is_cache else {}),
        }

    def partition(self, config: Mapping[str, Any]) -> Mapping[str, str | None] | str:
        if self.options.load_split_model:
            return "the model has been split already; remove option.load_split_model"
        if self.options.partition_schema == "compile_only":
            return without_keys("save_mp_checkpoint_path", "partition_schema")
        paths = ("save_mp_checkpoint_path", "compiled_graph_path")
        return without_keys("model_id", "revision", "partition_schema", *paths)

    def is_plain_checkpoint(self, directory: Path) -> bool:
        compiled = any((directory / name).exists() for name in (CHECKPOINT, COMPILED_BY_OPTIMUM))
        return not compiled and not (directory / SPLIT_WEIGHTS).is_dir()

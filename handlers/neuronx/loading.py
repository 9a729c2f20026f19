"""Loads a model for Neuron cores: chooses the library, finds compiled graphs, or compiles and saves them."""

from __future__ import annotations

import importlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from handlers.checkpoints.saving import saving
from handlers.checkpoints.transformers_loading import from_pretrained
from handlers.generation.prompts import PromptEncoder
from handlers.neuron_failures import failures_of_load
from handlers.neuronx import optimum_model, tnx_model
from handlers.neuronx.options import (
    AMP,
    CHECKPOINT,
    COMPILED,
    COMPILED_BY_OPTIMUM,
    SPLIT_WEIGHTS,
    NeuronxOptions,
    holds_graphs,
)
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.engine_loading import LoadedEngine
from handlers.rolling_batch.runner.bucket_runner import AlignedRunner, LineRunner
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from handlers.rolling_batch.warm_up import warm_up
from lmi_server.contract.errors import ModelLoadError, describe
from lmi_server.machine import environment

logger = logging.getLogger(__name__)

_VERSION = "VERSION"  # the file beside compiled graphs that names the compiler's version, as with LMI

_INSTALL = (
    "install it as AWS's guide for Neuron says (pip install {name} with the address of Neuron's own package index; the"
    " package of that name on PyPI is only a placeholder)"
)
_PACKAGES = {
    "tnx": ("transformers_neuronx", tnx_model.LIBRARY, _INSTALL.format(name=tnx_model.LIBRARY)),
    "optimum": (
        "optimum.neuron",
        optimum_model.LIBRARY,
        "install it with pip install optimum-neuron[neuronx] and the address of Neuron's own package index",
    ),
}


@dataclass(frozen=True)
class _Files:
    """Where the model's `weights` and its compiled `graphs` are; `root` holds the configuration and the tokenizer."""

    root: Path
    weights: str
    graphs: Path | None


def load_engine(model_dir: str, options: NeuronxOptions) -> LoadedEngine:
    """Load the model of `model_dir`, and make an engine that runs its graphs. Raises ModelLoadError."""
    began = time.perf_counter()
    environment.add_flags("NEURON_CC_FLAGS", options.compiler_flags())
    files = _find(model_dir, options)
    config = from_pretrained(AutoConfig, str(files.root), trust_remote_code=options.trust_remote_code)
    tokenizer = from_pretrained(AutoTokenizer, str(files.root), trust_remote_code=options.trust_remote_code)
    _check(config, files, options)
    loader = _loader(config, files, options)
    _import(loader)
    runner = _load(loader, model_dir, files, config, options)
    room = options.lines * options.n_positions  # of every line at full length
    limits = SchedulerLimits(options.lines, room, room, room, policy="fcfs", prompt_bucket=runner.longest_prompt)
    engine = RollingBatchEngine(
        runner, Scheduler(limits), tokenizer, _eos_token_ids(str(files.root), config, tokenizer), options.n_positions
    )
    prompts = PromptEncoder(tokenizer)
    with failures_of_load(_PACKAGES[loader][1], files.weights):
        warm_up(engine, prompts)
    details = {
        "library": _PACKAGES[loader][1],
        "dtype": options.dtype,
        "neuron_cores": options.degree,
        "max_model_len": options.n_positions,
        "max_running_requests": options.lines,
        "prompt_buckets": list(options.prompt_buckets()),
        "batching": "continuous" if isinstance(runner, LineRunner) else "all sequences at one column",
        "graphs": str(_compiled_before(loader, files) or "compiled now"),
        "load_seconds": round(time.perf_counter() - began, 1),
    }
    return LoadedEngine(engine, prompts, options.n_positions, room, details)


def _find(model_dir: str, options: NeuronxOptions) -> _Files:
    """Return where the parts of the model are: as one checkpoint, or as LMI lays out what was compiled before."""
    root = Path(options.model_id or model_dir)
    checkpoint = root / CHECKPOINT
    weights = checkpoint if (checkpoint / "config.json").is_file() else root
    asked = options.compiled_graph_path
    places = (
        [Path(asked)] if asked is not None else [root / COMPILED, root, Path(model_dir) / COMPILED, Path(model_dir)]
    )
    return _Files(root, str(weights), next((place for place in places if holds_graphs(place)), None))


def _check(config: Any, files: _Files, options: NeuronxOptions) -> None:
    if options.tensor_parallel_degree == "max":
        raise ModelLoadError(
            "option.tensor_parallel_degree=max: no neuron-ls says how many Neuron cores there are; set the number"
        )
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and options.n_positions > context:
        raise ModelLoadError(
            f"option.n_positions={options.n_positions} is more than the model's context of {context} tokens"
        )
    if options.load_split_model and not (Path(files.weights) / SPLIT_WEIGHTS).is_dir():
        raise ModelLoadError(
            f"option.load_split_model=true: {files.weights} holds no directory pytorch_model.bin; remove the key, or"
            " split the model with lmi-server partition"
        )
    compiled_for = getattr(config, "neuron", None) or {}
    asked = {
        "option.n_positions": (options.n_positions, compiled_for.get("sequence_length")),
        "option.tensor_parallel_degree": (options.degree, compiled_for.get("num_cores")),
        "option.max_rolling_batch_size": (options.lines, compiled_for.get("batch_size")),
        "option.amp": (AMP[options.dtype], compiled_for.get("auto_cast_type")),
    }
    wrong = [f"{key}={has} in place of {want}" for key, (want, has) in asked.items() if has is not None and has != want]
    if wrong and files.graphs is not None:
        raise ModelLoadError(
            f"{files.root} was compiled for other shapes; set {', '.join(wrong)}, or run lmi-server partition again"
        )
    _warn_of_another_compiler(files)


def _warn_of_another_compiler(files: _Files) -> None:
    version = None if files.graphs is None else files.graphs / _VERSION
    here = _compiler_version()
    if version is not None and version.is_file() and here is not None and version.read_text().strip() != here:
        logger.warning(
            "%s was compiled by neuronx-cc %s, not by %s, which is installed; if it does not load, run lmi-server"
            " partition again",
            files.graphs,
            version.read_text().strip(),
            here,
        )


def _loader(config: Any, files: _Files, options: NeuronxOptions) -> str:
    if options.loader is not None:
        return options.loader
    if (files.root / COMPILED_BY_OPTIMUM).is_file():
        return "optimum"
    return "tnx" if config.model_type in tnx_model.MODEL_TYPES else "optimum"


def _compiled_before(loader: str, files: _Files) -> Path | None:
    """Return where the graphs are that the library loads; None if it compiles."""
    if loader == "tnx":
        return files.graphs
    weights = Path(files.weights)
    return weights if (weights / COMPILED_BY_OPTIMUM).is_file() else None


def _import(loader: str) -> None:
    """Import the library. Raises ModelLoadError that names the package and how to install it."""
    module, package, install = _PACKAGES[loader]
    try:
        importlib.import_module(module)
    except Exception as error:  # the border to the library, whose placeholder on PyPI raises as well
        raise ModelLoadError(
            f"the model needs the Python package {package}, which cannot be imported ({describe(error)}); {install}"
        ) from error


def _load(
    loader: str, model_dir: str, files: _Files, config: Any, options: NeuronxOptions
) -> LineRunner | AlignedRunner:
    save_to = None if options.save_mp_checkpoint_path is None else Path(options.save_mp_checkpoint_path)
    if loader == "optimum":
        return optimum_model.load(files.weights, config, options, save_to)
    if save_to is None:
        return tnx_model.load(files.weights, config, options, files.graphs, None)
    with saving(save_to):
        return _partition(model_dir, files, config, options, save_to)


def _partition(
    model_dir: str, files: _Files, config: Any, options: NeuronxOptions, target: Path
) -> LineRunner | AlignedRunner:
    """Write the model to `target` in the layout of option.partition_schema, and load it from there."""
    if options.partition_schema == "compile_only":
        if files.root == Path(model_dir):
            raise ModelLoadError(
                "option.partition_schema=compile_only writes no weights; name the model in option.model_id, where they"
                " stay, or use legacy or safetensors"
            )
        target.mkdir(parents=True, exist_ok=True)
        return _compile(files.weights, config, options, target)
    checkpoint = target / CHECKPOINT
    checkpoint.mkdir(parents=True, exist_ok=True)
    save = tnx_model.save_safetensors if options.partition_schema == "safetensors" else tnx_model.save_split
    save(files.weights, options, checkpoint)
    runner = _compile(str(checkpoint), config, options, target / COMPILED)
    described = {**config.to_dict(), "neuron": _compiled_for(options)}
    (target / "config.json").write_text(json.dumps(described, indent=2, default=str), encoding="utf-8")
    return runner


def _compile(weights: str, config: Any, options: NeuronxOptions, graphs: Path) -> LineRunner | AlignedRunner:
    runner = tnx_model.load(weights, config, options, None, graphs)
    version = _compiler_version()
    if version is not None:
        (graphs / _VERSION).write_text(version, encoding="utf-8")
    logger.info("compiled graphs written to %s", graphs)
    return runner


def _compiled_for(options: NeuronxOptions) -> dict[str, Any]:
    """Return what LMI writes to config.json about the graphs."""
    return {
        "auto_cast_type": AMP[options.dtype],
        "batch_size": options.lines,
        "checkpoint_id": None,
        "checkpoint_revision": None,
        "compiler_type": "neuronx-cc",
        "compiler_version": _compiler_version(),
        "num_cores": options.degree,
        "sequence_length": options.n_positions,
    }


def _compiler_version() -> str | None:
    try:
        return str(importlib.import_module("neuronxcc").__version__)
    except ImportError:
        return None


def _eos_token_ids(path: str, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text; the compiled model has no generation_config of its own."""
    configured = config.eos_token_id
    if (Path(path) / "generation_config.json").is_file():
        configured = from_pretrained(GenerationConfig, path).eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)

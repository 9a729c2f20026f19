"""Loads a causal language model through DeepSpeed for the rolling batch: whole, or this rank's part of it."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from handlers.checkpoints.gpus import own_gpu, usable_gpus
from handlers.checkpoints.transformers_loading import load_config, load_model, load_tokenizer, set_threads
from handlers.deepspeed.initialization import check_before_loading, initialize
from handlers.deepspeed.int8 import quantize
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.deepspeed.shards import Shards, find_shards, save_shards
from handlers.deepspeed.whole_model import load_whole_model
from handlers.ranks.sharding import local_bytes
from handlers.rolling_batch.engine_loading import LoadedModel, set_kernel_threads
from handlers.rolling_batch.runner.load_check import LoadCheck
from lmi_server.machine.environment import own_rank


def load(path: str, options: DeepSpeedOptions) -> LoadedModel:
    """Load the model in directory `path`: whole, or in a group of ranks the part of this one.

    Raises ModelLoadError if the model or the options do not allow it.
    """
    set_threads(options.threads)
    set_kernel_threads()
    rank = own_rank()
    own_gpu(rank)
    reading = options.reading()
    config = load_config(path, reading)
    check_before_loading(config, options, rank.size)
    shards = find_shards(path, options, rank)
    model = _model(path, config, options, shards, rank.size)
    tokenizer = load_tokenizer(path, reading)
    # LoadCheck keeps the logits of the whole model, to compare them with those after DeepSpeed and quantisation. Shards
    # come without a whole model.
    max_len = _max_len(model, options)
    check = None if shards else LoadCheck(model, max_len, rounds_activations=options.quantize is not None)
    communicator = initialize(model, options, rank)
    if shards is not None:
        shards.fill(model)
    details = quantize(model, tokenizer, options)
    if shards is not None and shards.quantization is not None:
        details = {"quantization": shards.quantization}
        check = LoadCheck(model, max_len, rounds_activations=True)
    if options.save_mp_checkpoint_path is not None:
        save_shards(model, options, rank, details.get("quantization"))
    details = {"engine": "deepspeed", **details}
    kept = options.packed_kv_dtype
    return LoadedModel(
        model, tokenizer, max_len, local_bytes(model), communicator, check, details=details, kv_dtype=kept
    )


def _model(path: str, config: Any, options: DeepSpeedOptions, shards: Shards | None, ranks: int) -> Any:
    if shards is not None:
        return shards.empty_model(AutoModelForCausalLM, config, options.trust_remote_code)
    whole = load_whole_model(AutoModelForCausalLM, path, config, options)
    if whole is not None:
        return whole
    # With several GPUs the whole model may not fit on one; DeepSpeed moves this rank's part there.
    device_map = {"device_map": "cpu"} if ranks > 1 and usable_gpus().count else {}
    return load_model(AutoModelForCausalLM, path, options.reading(), **device_map)


def _max_len(model: Any, options: DeepSpeedOptions) -> int:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return options.max_tokens if context is None else min(options.max_tokens, context)

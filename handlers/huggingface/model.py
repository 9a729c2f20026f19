"""Loads a causal language model for the rolling batch with transformers: whole, or split over the ranks of a group."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from handlers.checkpoints.blocks.int8_activations import round_activations
from handlers.checkpoints.options import BLOCK_FORMATS
from handlers.checkpoints.placement import main_device, placement_details
from handlers.checkpoints.quantization import quantization_details, rounds_activations
from handlers.checkpoints.transformers_loading import (
    load_config,
    load_model,
    load_tokenizer,
    quantize_blocks,
    set_threads,
)
from handlers.huggingface.options import HuggingFaceOptions
from handlers.ranks.communicator import Communicator
from handlers.ranks.sharding import (
    check_degree,
    join_process_group,
    loading_arguments,
    local_bytes,
    make_local,
)
from handlers.rolling_batch.engine_loading import LoadedModel, set_kernel_threads
from handlers.rolling_batch.images.loading import load_image_model, load_images, reads_images
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.states.probe import keeps_states
from lmi_server.configuration.options import NGRAM
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.ranks import Rank
from lmi_server.machine.environment import own_rank

logger = logging.getLogger(__name__)

_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")  # MPT and Bloom have the others
_DEFAULT_CONTEXT = 2048  # tokens, of models that know no limit; vLLM takes as many
_STATES_MAX_LEN = 32_768  # tokens; a model whose layers keep states may have no context that its configuration limits


def load(path: str, options: HuggingFaceOptions) -> LoadedModel:
    """Load the model in directory `path`, or this rank's part of it. Raises ModelLoadError."""
    set_threads(options.threads)
    set_kernel_threads()
    rank = own_rank()
    drafting = options.speculative_draft_model
    if rank.size > 1:
        if drafting not in (None, NGRAM):
            raise _no_draft(drafting, "a model that is split over ranks takes no draft model")
        return _load_part(path, options, rank)
    loaded = _load_whole(path, options)
    return loaded if drafting in (None, NGRAM) else replace(loaded, draft=_load_draft(drafting, loaded, options))


def _no_draft(path: str | None, problem: str) -> ModelLoadError:
    return ModelLoadError(
        f"option.speculative_draft_model={path}: {problem}; set option.speculative_draft_model={NGRAM}, or leave it out"
    )


def _load_draft(path: str, loaded: LoadedModel, options: HuggingFaceOptions) -> LoadedModel:
    """Load the model that drafts tokens for `loaded`. Raises ModelLoadError if it cannot be used for that."""
    if main_device(loaded.model).type != "cpu":
        raise _no_draft(path, "on GPUs only option.rolling_batch=vllm takes a draft model")
    changed: dict[str, Any] = {"save_mp_checkpoint_path": None, "revision": None, "max_model_len": None}
    if not options.keeps_blocks(path):  # its layers may be plain ones, whose activations are not rounded
        changed["activation_dtype"] = "auto"
    own = options.model_copy(update=changed)
    model, tokenizer = load_model(AutoModelForCausalLM, path, own), load_tokenizer(path, own)
    if tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise _no_draft(path, "its tokens are not those of the model; a draft model is one of the same family")
    return LoadedModel(model, tokenizer, min(_max_len(model, own), loaded.max_len), local_bytes(model))


def _load_whole(path: str, options: HuggingFaceOptions) -> LoadedModel:
    if reads_images(load_config(path, options)):
        return _load_with_images(path, options)
    model = load_model(AutoModelForCausalLM, path, options)
    max_len = _max_len(model, options)
    check = LoadCheck(model, max_len, rounds_activations=True) if rounds_activations(model) else None
    return LoadedModel(
        model,
        load_tokenizer(path, options),
        max_len,
        local_bytes(model),
        check=check,
        kv_dtype=options.packed_kv_dtype,
        details={**quantization_details(model), **placement_details(model)},
    )


def _load_with_images(path: str, options: HuggingFaceOptions) -> LoadedModel:
    whole, model = load_image_model(path, options)
    max_len, tokenizer = _max_len(model, options), load_tokenizer(path, options)
    images = load_images(whole, path, tokenizer, options)
    return LoadedModel(
        model,
        tokenizer,
        max_len,
        local_bytes(whole),
        check=LoadCheck(whole, max_len, rounds_activations=rounds_activations(whole)),
        details={"model": type(whole).__name__, **quantization_details(whole), **placement_details(whole)},
        images=images,
        kv_dtype=options.packed_kv_dtype,
    )


def _load_part(path: str, options: HuggingFaceOptions, rank: Rank) -> LoadedModel:
    config = load_config(path, options)
    if reads_images(config) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError("a model that reads images is not split over ranks; set option.tensor_parallel_degree=1")
    in_blocks = options.quantize in BLOCK_FORMATS
    if (options.quantize and not in_blocks) or getattr(config, "quantization_config", None):
        raise ModelLoadError("quantised weights are not split over ranks; set option.tensor_parallel_degree=1")
    check_degree(config, rank.size)
    join_process_group(rank)
    model = load_model(AutoModelForCausalLM, path, options, **loading_arguments(rank.size))
    communicator, max_len = Communicator(rank), _max_len(model, options)
    # The check takes the logits of transformers' own split modules, so it comes before they are replaced. Blocks have
    # other logits: of these the check compares fused modules, attention and cache.
    check = None if in_blocks else LoadCheck(model, max_len)
    is_local = make_local(model, communicator)
    details = quantize_blocks(model, options) if in_blocks else {}
    if options.activation_dtype == "int8":
        round_activations(model)
    check = check or LoadCheck(model, max_len, rounds_activations(model))
    weights = local_bytes(model)
    tokenizer, kept = load_tokenizer(path, options), options.packed_kv_dtype
    return LoadedModel(
        model, tokenizer, max_len, weights, communicator, check, is_local, details=details, kv_dtype=kept
    )


def _max_len(model: Any, options: HuggingFaceOptions) -> int:
    text_config = model.config.get_text_config()
    named = (getattr(text_config, name, None) for name in _CONTEXT_NAMES)
    context = next((length for length in named if length), None)
    if options.max_model_len is None:
        if context is None and keeps_states(model):
            return _STATES_MAX_LEN
        if context is None:
            logger.warning(
                "config.json gives no max_position_embeddings: prompts and outputs have up to %d tokens in all;"
                " option.max_model_len sets another limit",
                _DEFAULT_CONTEXT,
            )
            return _DEFAULT_CONTEXT
        return int(context)
    if context is not None and options.max_model_len > context:
        raise ModelLoadError(
            f"option.max_model_len={options.max_model_len} is more than the model's context of {context} tokens;"
            " lower it, or leave it out"
        )
    return options.max_model_len

"""Padding of texts to the length of a longer one: with which token, and whether it changes the output of a model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from handlers.checkpoints.options import TransformersOptions
from handlers.checkpoints.placement import main_device
from handlers.checkpoints.transformers_loading import load_tokenizer
from handlers.logits import refuse_broken, relative_error
from lmi_server.contract.errors import ModelLoadError, describe

logger = logging.getLogger(__name__)

_SHORT, _LONG = 6, 16  # tokens
# Keys of config.json: the number of tokens that attention chooses. Padding takes places among them, which only shows if
# a prompt is longer.
_NUMBERS_CHOSEN = ("index_topk", "index_topk_blocks", "keep_window_size")
_MAX_ERRORS = {torch.float32: 1e-3}
_MAX_ERROR = 0.25  # of shorter data types, relative to the spread of the logits


def load_padding_tokenizer(path: str, options: TransformersOptions) -> Any:
    """Return the checkpoint's tokenizer, which pads with the end token if it has no other. Raises ModelLoadError."""
    tokenizer = load_tokenizer(path, options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_harmless(model: Any, pad_token: int) -> bool:
    """Return whether the logits of a short prompt stay the same beside a longer one.

    They change if the model counts positions from the first row of the batch, padding included (decoders of BART), or
    lets an index choose the tokens to attend to. Raises ModelLoadError if the model cannot generate at all, computes
    NaN, or finds all tokens equally likely.
    """
    text_config = model.config.get_text_config()
    if any(getattr(text_config, name, None) for name in _NUMBERS_CHOSEN):
        return False
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (2, _LONG), generator=generator)
    mask = torch.ones_like(ids)
    try:
        alone = _logits(model, ids[:1, -_SHORT:], mask[:1, -_SHORT:], pad_token)
    except Exception as error:  # the border to the code of any model
        raise ModelLoadError(
            f"{type(model).__name__} cannot generate text in static batches: {describe(error)};"
            " option.rolling_batch=vllm serves it if vLLM can"
        ) from error
    refuse_broken(alone, type(model).__name__)
    ids[0, :-_SHORT], mask[0, :-_SHORT] = pad_token, 0
    try:
        padded = _logits(model, ids, mask, pad_token)
    except Exception as error:  # noqa: BLE001 - as above; it takes one prompt at a time
        logger.info("%s takes no padding: %s", type(model).__name__, describe(error))
        return False
    return relative_error(padded, alone) <= _MAX_ERRORS.get(model.dtype, _MAX_ERROR)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, pad_token: int) -> torch.Tensor:
    """Return the logits of two new tokens of the first row."""
    device = main_device(model)
    found = model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), pad_token_id=pad_token,
        max_new_tokens=2, min_new_tokens=2, do_sample=False, num_beams=1, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    return torch.stack([step[0].float() for step in found.logits])

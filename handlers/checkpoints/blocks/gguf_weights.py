"""Keeps the weights of a model in GGUF as the file stores them.

transformers unpacks them while it loads the model, and knows for each family how the file orders them. Each weight is
compared with what transformers has made of it. A weight that is changed otherwise than in the order of its rows stays
unpacked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.checkpoints.blocks.formats import FORMATS, Q8_0, StoredWeight
from handlers.checkpoints.blocks.layers import BlockLinear, StoredEmbedding
from handlers.checkpoints.quantization import weight_details

logger = logging.getLogger(__name__)

_Q5_0, _Q5_0_BYTES = "q5_0", 22  # of a block of 32 weights


def keep_stored(model: Any, path: str) -> dict[str, Any]:
    """Replace linear layers and embeddings of a model on the CPU by such that hold the file's blocks.

    Return details for the log, nothing if the file has no blocks that are known here.
    """
    before = model.get_memory_footprint()
    files = dict(_known_weights(model, path))
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    formats: dict[str, int] = {}
    kept: dict[nn.Module, StoredWeight] = {}
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, nn.Embedding) and name in files:
            weight = _in_order(files[name], module.weight, model.config)
            if weight is None:
                logger.info("%s stays unpacked: transformers changes its weights", name)
                continue
            kept[module] = weight
            formats[weight.format.name] = formats.get(weight.format.name, 0) + 1
    if is_tied and embeddings in kept:
        kept[head] = kept[embeddings]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in kept:
                setattr(module, name, _replacement(child, kept[child]))
    if not kept:
        return {}
    names = " ".join(f"{count} {name}" for name, count in sorted(formats.items()))
    return weight_details(names, model.get_memory_footprint(), before)


def _replacement(module: Any, weight: StoredWeight) -> nn.Module:
    dtype = module.weight.dtype
    if isinstance(module, nn.Embedding):
        return StoredEmbedding(weight, dtype)
    return BlockLinear.from_stored(weight, None if module.bias is None else module.bias.detach(), dtype)


def _known_weights(model: Any, path: str) -> Iterator[tuple[str, StoredWeight]]:
    """Yield the weights of the file whose formats are known, by the name of their module."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        name = re.sub(r"\.weight$", "", names.get(tensor.name, ""))
        form = tensor.tensor_type.name.lower()
        if name and tensor.data.ndim == 2 and (form == _Q5_0 or form in FORMATS):
            # Mapped so that torch takes it: pages without writers stay the file's.
            mapped = np.memmap(path, np.uint8, "c", int(tensor.data_offset), tensor.data.shape)
            raw = torch.from_numpy(mapped)
            yield name, StoredWeight(Q8_0, _as_q8_0(raw)) if form == _Q5_0 else StoredWeight(FORMATS[form], raw)


def _as_q8_0(raw: torch.Tensor) -> torch.Tensor:
    """Return rows of Q5_0 as such of Q8_0 with the same numbers and scales: a float16, 32 fifth bits, and lower halves.

    Files named _K_M have Q5_0 where 256 divides no width. Unpacked to bfloat16 such a layer takes twice as much, and
    is not fused with those beside it.
    """
    blocks = raw.unflatten(1, (-1, _Q5_0_BYTES))
    scales, fifth, halves = blocks.split((2, 4, 16), dim=2)
    high = (fifth[:, :, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2)
    numbers = (torch.cat((halves & 15, halves >> 4), dim=2) | high << 4).view(torch.int8) - 16
    return torch.cat((scales, numbers.view(torch.uint8)), dim=2).flatten(1)


def _in_order(stored: StoredWeight, expected: torch.Tensor, config: Any) -> StoredWeight | None:
    """Return the weight with its rows as in the model; None if it is another weight."""
    if (len(stored.raw), stored.in_features) != tuple(expected.shape):
        return None
    unpacked = stored.numbers().weight()
    heads = {getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    orders = [torch.arange(len(expected))]
    for count in filter(None, heads):
        if len(expected) % (2 * count) == 0:
            # As files of Llama have queries and keys: the two elements of a rotary pair side by side.
            orders.append(orders[0].view(count, -1, 2).transpose(1, 2).flatten())
    for order in orders:
        if torch.equal(unpacked[order].to(expected.dtype), expected.detach()):
            is_same = order is orders[0]
            return stored if is_same else StoredWeight(stored.format, stored.raw[order])
    return None

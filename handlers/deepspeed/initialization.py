"""`deepspeed.init_inference` over a model that transformers has loaded: its configuration, and what it leaves behind.

AutoTP splits the linear layers of each block in place. They are then replaced by plain ones over this rank's part, so
that the rolling batch can fuse them, and what they sum goes over `Communicator`: DeepSpeed's own sums over shared
memory are compiled on the user's machine for a minute, and leave their buffers behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from handlers.deepspeed.int8 import check_device
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.rolling_batch.communicator import Communicator
from handlers.rolling_batch.sharding import RowParallelLinear, join_process_group, plain_linear
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.ranks import Rank

_DEGREE = "option.tensor_parallel_degree"


def initialize(model: nn.Module, options: DeepSpeedOptions, rank: Rank, inject: bool = False) -> Communicator | None:
    """Let DeepSpeed work on `model` in place; return the ranks that it is split over, None where it is whole.

    `inject` has DeepSpeed put its kernels into the model. Raises ModelLoadError with what DeepSpeed says.
    """
    config = inference_config(options, model.dtype, rank.size, inject)
    deepspeed = import_deepspeed()
    communicator = _join(rank) if rank.size > 1 else None
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    try:
        deepspeed.init_inference(model, config=config)
    # What DeepSpeed raises for a model, a device or a configuration that it cannot serve.
    except (AssertionError, AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(f"DeepSpeed cannot serve {type(model).__name__}: {error}") from error
    _put_back(model, buffers)
    if communicator is not None:
        _make_local(model, communicator)
    return communicator


def import_deepspeed() -> Any:
    """Import DeepSpeed; on the CPU without what it would compile. Raises ModelLoadError."""
    try:
        import deepspeed
    except ImportError as error:
        raise ModelLoadError(
            f"the deepspeed handler needs the extra 'deepspeed' ({error}); install lmi-server[deepspeed]"
        ) from error
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}  # it asks there what it may compile; asking runs compilers
    return deepspeed


def inference_config(options: DeepSpeedOptions, dtype: torch.dtype, ranks: int, inject: bool) -> dict[str, Any]:
    """Return what `init_inference` is given. Raises ModelLoadError where a file of one's own says what cannot be."""
    if options.deepspeed_config_path is None:
        made = {**options.engine_arguments(), "tensor_parallel": {"tp_size": ranks}}
        return {**made, "dtype": dtype, "replace_with_kernel_inject": inject}
    config = dict(read_json(options.deepspeed_config_path, "option.deepspeed_config_path"))
    parallel = config.get("tensor_parallel", config.get("tp", {}))
    degree = parallel.get("tp_size", 1) if isinstance(parallel, Mapping) else 1
    if degree != ranks:
        raise ModelLoadError(
            f"option.deepspeed_config_path: tensor_parallel.tp_size is {degree} in {options.deepspeed_config_path},"
            f" and {_DEGREE} is {ranks}; write the same number"
        )
    return {"dtype": dtype, **config}


def read_json(path: str, key: str) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises ModelLoadError naming the option that names it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{key}: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{key}: {path} holds no JSON object")
    return content


def check_before_loading(config: Any, options: DeepSpeedOptions, degree: int) -> None:
    """Raise ModelLoadError for what can be told from the configuration of a model that `degree` ranks are to split.

    DeepSpeed shares out heads of any number to as many ranks at most.
    """
    has_gpu = torch.cuda.is_available()
    if options.dtype == "fp16" and not has_gpu:
        raise ModelLoadError("option.dtype=fp16: DeepSpeed has no fp16 on the CPU; set option.dtype=bf16 or fp32")
    if options.quantize is not None:
        check_device(torch.device("cuda" if has_gpu else "cpu"))
    if getattr(config, "quantization_config", None):
        raise ModelLoadError(
            "the checkpoint is quantised already, and DeepSpeed takes none that is; use"
            " option.entryPoint=djl_python.huggingface"
        )
    text_config = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count < degree:
            raise ModelLoadError(f"{_DEGREE}={degree} is more than {name}={count} of the model; lower it")


def choose_device(rank: Rank) -> None:
    """Let "cuda" mean the GPU of this rank, where there are any."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank.rank)


def _join(rank: Rank) -> Communicator:
    communicator = Communicator(rank)
    join_process_group(rank)
    return communicator


def _put_back(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Undo what init_inference did to buffers: it casts rotary frequencies to bfloat16, which loses positions."""
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        current = getattr(module, attribute, None)
        if isinstance(current, torch.Tensor) and current.shape == buffer.shape:
            setattr(module, attribute, buffer.to(current.device))


def _make_local(model: nn.Module, communicator: Communicator) -> None:
    """Replace what AutoTP put into the model; a layer of a kind that is not known here keeps DeepSpeed's own sums."""
    from deepspeed.module_inject import layers

    columns = {layers.LinearLayer, layers.fused_LinearLayer, layers.GateUpPack_LinearLayer}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in columns:
                setattr(module, name, plain_linear(child.weight.detach(), _bias(child)))
            elif type(child) is layers.LinearAllreduce:
                local = plain_linear(child.weight.detach(), None)
                setattr(module, name, RowParallelLinear(local, _bias(child), communicator))
            elif type(child) is layers.LmHeadLinearAllreduce:
                setattr(module, name, _split_head(child, communicator))


def _bias(layer: Any) -> torch.Tensor | None:
    return None if layer.bias is None else layer.bias.detach()


def _split_head(head: Any, communicator: Communicator) -> SlicedLinear:
    sizes = head._partition_sizes  # DeepSpeed's own forward reads them too; there is no other place
    first = sum(sizes[: communicator.rank])
    local = plain_linear(head.weight.detach(), None)
    return SlicedLinear(RowParallelLinear(local, _bias(head), communicator), first, first + sizes[communicator.rank])


class SlicedLinear(nn.Module):
    """A linear layer whose input all ranks have in full, and of whose weight each has the columns `first:last`."""

    def __init__(self, linear: RowParallelLinear, first: int, last: int) -> None:
        super().__init__()
        self.summed = linear
        self._columns = slice(first, last)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features), the same on all ranks."""
        return self.summed(hidden[..., self._columns])

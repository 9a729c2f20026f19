"""Splits a model with `deepspeed.init_inference`, and replaces the layers that DeepSpeed puts into it.

transformers has loaded the whole model. DeepSpeed's AutoTP then splits the linear layers of each block in place:

- By output (query, key, value, gate, up): every rank has all inputs and computes some outputs. No communication.
- By input (the output projection of attention, the down projection): every rank has some inputs, and the ranks' partial
  outputs must be summed. DeepSpeed's class for it is LinearAllreduce.

AutoTP's classes are then replaced by plain linear layers over this rank's part, for two reasons. The rolling batch
fuses layers that it recognises as plain ones. And DeepSpeed's own sum on the CPU is a C++ extension: it is compiled on
the user's machine for a minute at the first start, crashes if the variable LOCAL_SIZE is not set, and leaves its shared
memory behind in /dev/shm when a process is killed. The replacement sums through this project's own communication.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from handlers.checkpoints.gpus import usable_gpus
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.ranks.communicator import Communicator
from handlers.ranks.sharding import RowParallelLinear, join_process_group, plain_linear
from lmi_server.contract.errors import ModelLoadError, needs_extra
from lmi_server.contract.ranks import Rank
from lmi_server.processes import model_imports

_DEGREE = "option.tensor_parallel_degree"


def initialize(model: nn.Module, options: DeepSpeedOptions, rank: Rank, inject: bool = False) -> Communicator | None:
    """Split `model` in place with DeepSpeed; return the connection of its ranks, None on a single rank.

    `inject` replaces layers by DeepSpeed's kernels, which exist for GPUs only. Raises ModelLoadError with DeepSpeed's
    message if DeepSpeed cannot serve the model.
    """
    config = inference_config(options, model.dtype, rank.size, inject)
    deepspeed = import_deepspeed()
    communicator = None
    if rank.size > 1:
        communicator = Communicator(rank)
        join_process_group(rank)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    try:
        deepspeed.init_inference(model, config=config)
    # DeepSpeed has no error type of its own; it raises these for models, devices and configurations.
    except (AssertionError, AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(f"DeepSpeed cannot serve {type(model).__name__}: {error}") from error
    _restore_buffers(model, buffers)
    if communicator is not None:
        _replace_split_layers(model, communicator)
    return communicator


def import_deepspeed() -> Any:
    """Import DeepSpeed. Raises ModelLoadError if it is not installed."""
    # Its autotuner, which nothing here uses, takes XGBoost if it is there, and with it scikit-learn and pandas.
    with needs_extra("the deepspeed handler needs", "deepspeed"), model_imports.hide("xgboost"):
        import deepspeed
    if not usable_gpus().count:
        # The extensions that DeepSpeed may compile. Reading an entry runs compilers to find out if it can, for seconds,
        # and nothing on the CPU needs any.
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def inference_config(options: DeepSpeedOptions, dtype: torch.dtype, ranks: int, inject: bool) -> dict[str, Any]:
    """Return the configuration for `init_inference`, from the file of option.deepspeed_config_path or from the options.

    Raises ModelLoadError if the file cannot be read or contradicts the number of ranks.
    """
    if options.deepspeed_config_path is None:
        from_options = {**options.engine_arguments(), "tensor_parallel": {"tp_size": ranks}}
        return {**from_options, "dtype": dtype, "replace_with_kernel_inject": inject}
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
    """Return the JSON object in the file at `path`. Raises ModelLoadError, which names the option `key` of the path."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{key}: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{key}: {path} does not hold a JSON object")
    return content


def check_before_loading(config: Any, options: DeepSpeedOptions, degree: int) -> None:
    """Raise ModelLoadError if the options or the model's `config` rule out that `degree` ranks serve the model.

    DeepSpeed divides attention heads unevenly if it must, but each rank needs one.
    """
    _check_file(options, degree)
    has_gpu = usable_gpus().count > 0
    if options.dtype == "fp16" and not has_gpu:
        raise ModelLoadError("option.dtype=fp16: DeepSpeed has no fp16 on the CPU; set option.dtype=bf16 or fp32")
    if getattr(config, "quantization_config", None):
        raise ModelLoadError(
            "the checkpoint is quantised already, and DeepSpeed cannot split such a checkpoint; use"
            " option.entryPoint=djl_python.huggingface"
        )
    text_config = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count < degree:
            raise ModelLoadError(f"{_DEGREE}={degree} is more than {name}={count} of the model; lower it")


def _check_file(options: DeepSpeedOptions, degree: int) -> None:
    """Raise ModelLoadError for a key or a value that DeepSpeed refuses in the file of option.deepspeed_config_path."""
    path = options.deepspeed_config_path
    if path is None:
        return
    config = inference_config(options, torch.float32, degree, inject=False)
    import_deepspeed()
    from deepspeed.inference.config import DeepSpeedInferenceConfig

    try:
        DeepSpeedInferenceConfig(**config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        problem = f"{key} is no key of DeepSpeed's configuration; remove it"
        if first["type"] != "extra_forbidden":
            problem = f"{key} = {first['input']!r} is not allowed: {first['msg']}; correct it"
        raise ModelLoadError(f"option.deepspeed_config_path: {path}: {problem}") from error


def _restore_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Restore the floating-point buffers that init_inference has cast to the model's data type.

    Among them are the rotary frequencies: in bfloat16 (8 bits of precision) distant positions become equal.
    """
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        current = getattr(module, attribute, None)
        if isinstance(current, torch.Tensor) and current.shape == buffer.shape:
            setattr(module, attribute, buffer.to(current.device))


def _replace_split_layers(model: nn.Module, communicator: Communicator) -> None:
    """Replace AutoTP's layers by plain ones over this rank's part; layers of an unknown kind stay as they are."""
    from deepspeed.module_inject import layers

    split_by_output = {layers.LinearLayer, layers.fused_LinearLayer, layers.GateUpPack_LinearLayer}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in split_by_output:
                setattr(module, name, plain_linear(child.weight.detach(), _bias(child)))
            elif type(child) is layers.LinearAllreduce:
                local = plain_linear(child.weight.detach(), None)
                setattr(module, name, RowParallelLinear(local, _bias(child), communicator))
            elif type(child) is layers.LmHeadLinearAllreduce:
                setattr(module, name, _split_head(child, communicator))


def _bias(layer: Any) -> torch.Tensor | None:
    return None if layer.bias is None else layer.bias.detach()


def _split_head(head: Any, communicator: Communicator) -> SlicedLinear:
    sizes = head._partition_sizes  # private, but the only place; DeepSpeed's own forward reads it, too
    first = sum(sizes[: communicator.rank])
    local = plain_linear(head.weight.detach(), None)
    return SlicedLinear(RowParallelLinear(local, _bias(head), communicator), first, first + sizes[communicator.rank])


class SlicedLinear(nn.Module):
    """A linear layer split by input, whose input every rank has whole: this rank reads its columns `first:last` of it.

    AutoTP splits the last layer (the logits) this way.
    """

    def __init__(self, linear: RowParallelLinear, first: int, last: int) -> None:
        super().__init__()
        self.summed = linear
        self._columns = slice(first, last)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features), equal on all ranks."""
        return self.summed(hidden[..., self._columns])

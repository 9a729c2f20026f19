"""Splits a transformers model over the ranks of a group: each has a share of the heads, the MLP and the vocabulary.

transformers loads the model. Its tensor-parallel plan says which weights are split by columns or by rows, and each rank
reads its own part only. The split modules are then replaced by plain ones over the local part, so that the fused
modules and kernels for one rank work unchanged, and sums go through `Communicator`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from handlers.checkpoints.gpus import own_gpu
from handlers.ranks.communicator import Communicator
from lmi_server.contract.errors import ModelLoadError, first_line
from lmi_server.contract.ranks import Rank

_DEGREE = "option.tensor_parallel_degree"


def check_degree(config: Any, degree: int) -> None:
    """Raise ModelLoadError if a model cannot be split over `degree` ranks, before any weights are read."""
    text_config = config.get_text_config()
    if not getattr(text_config, "base_model_tp_plan", None):
        raise ModelLoadError(
            f"transformers has no tensor-parallel plan for {config.model_type}; set {_DEGREE}=1, or use another handler"
        )
    # All ranks need the same shapes: each derives from its own what it reduces and where its columns begin.
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count % degree:
            raise ModelLoadError(
                f"{_DEGREE}={degree} does not divide {name}={count} of the model; choose one that does"
            )


def join_process_group(rank: Rank) -> None:
    """Join torch's process group, by which transformers loads. Ranks meet through a file, without a port.

    On GPUs the ranks connect by NCCL, each from its own. Raises ModelLoadError if they cannot.
    """
    if torch.distributed.is_initialized():
        return
    device = own_gpu(rank)
    try:
        torch.distributed.init_process_group(
            "gloo" if device is None else "nccl",
            init_method=f"file://{rank.directory}/rendezvous",
            rank=rank.rank,
            world_size=rank.size,
            device_id=device,
        )
    except RuntimeError as error:
        raise ModelLoadError(
            f"{_DEGREE}={rank.size}: the ranks cannot connect: {first_line(error)}; NCCL_DEBUG=INFO has NCCL log why,"
            f" and {_DEGREE}=1 needs no connection"
        ) from error


def loading_arguments(degree: int) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` reads the part of this rank."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=degree), "device_map": None}


def local_bytes(model: nn.Module) -> dict[torch.device, int]:
    """Return the bytes of this rank's part of the weights on each of its devices."""
    sizes: dict[torch.device, int] = {}
    for tensor in map(_local, (*model.parameters(), *model.buffers())):
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
    return sizes


def make_local(model: nn.Module, communicator: Communicator) -> bool:
    """Replace the linear layers that transformers has split; return whether no other parameter is split."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and isinstance(child.weight, DTensor):
                setattr(module, name, _local_linear(child, communicator, gathers=child is _head(model)))
    return not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings()


def _local_linear(linear: nn.Linear, communicator: Communicator, gathers: bool) -> nn.Module:
    assert isinstance(linear.weight, DTensor)
    by_rows = linear.weight.placements[0] == Shard(1)  # of (outputs, inputs)
    bias = None if linear.bias is None else _local(linear.bias)
    # Under a split by inputs each rank has the whole bias, which may be added once only: after the sum.
    local = plain_linear(_local(linear.weight), None if by_rows else bias)
    if by_rows:
        return RowParallelLinear(local, bias, communicator)
    return ColumnParallelLinear(local, communicator) if gathers else local


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return a linear layer over these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


class RowParallelLinear(nn.Module):
    """A linear layer whose weight is split by inputs: the partial results of all ranks are summed (all-reduce)."""

    def __init__(self, linear: nn.Linear, bias: torch.Tensor | None, communicator: Communicator) -> None:
        super().__init__()
        self.linear = linear
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.communicator = communicator

    @property
    def weight(self) -> torch.Tensor:
        """The part of this rank, for code that reads its data type, as T5's does."""
        return self.linear.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., inputs of this rank) -> (..., out_features), the same on all ranks."""
        total = self.communicator.all_reduce(self.linear(hidden))
        return total if self.bias is None else total + self.bias


class ColumnParallelLinear(nn.Module):
    """A linear layer whose weight is split by outputs, which rank 0 gathers."""

    def __init__(self, linear: nn.Linear, communicator: Communicator) -> None:
        super().__init__()
        self.linear = linear
        self._communicator = communicator

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features) on rank 0, (..., outputs of this rank) elsewhere."""
        return self._communicator.gather_columns(self.linear(hidden))

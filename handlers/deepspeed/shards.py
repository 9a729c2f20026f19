"""Writes and loads weights that were split or quantised ahead of time, in the form of each rank.

`lmi-server partition` writes them (through `option.save_mp_checkpoint_path`), and `option.checkpoint` loads them. The
directory has the model's own small files, a manifest, and the tensors of each rank as safetensors. The manifest has the
name of DeepSpeed's own, because users' configurations name it, but a format of its own: DeepSpeed's files serve only
its kernels, and of a model split by AutoTP they hold the last layer of rank 0 alone. `whole_model.py` loads a list of
files with a whole model, in DeepSpeed's form.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.initialization import no_init_weights

from handlers.checkpoints.gpus import usable_gpus
from handlers.deepspeed.int8 import insert_empty_layers
from handlers.deepspeed.manifest import MANIFEST_TYPE, SHARDS_MANIFEST, WholeModel, read_manifest
from handlers.deepspeed.options import DeepSpeedOptions
from lmi_server.configuration.options import LONG_DTYPES
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.ranks import Rank

logger = logging.getLogger(__name__)

_TENSORS_PER_FILE = 64


@dataclass(frozen=True)
class Shards:
    """The weights of one rank, in `files`; `quantization` is the value of option.quantize that made them, or None."""

    files: tuple[Path, ...]
    dtype: torch.dtype
    quantization: str | None

    def empty_model(self, auto_class: Any, config: Any, trust_remote_code: bool) -> Any:
        """Return the model with uninitialised weights: the system gives memory to pages only when they are written."""
        with no_init_weights():
            model = auto_class.from_config(config, dtype=self.dtype, trust_remote_code=trust_remote_code)
        model.requires_grad_(False)
        return model.eval()

    def fill(self, model: nn.Module) -> None:
        """Load the weights into `model`, which DeepSpeed has split already.

        Raises ModelLoadError if names or shapes of the weights do not match the model.
        """
        tensors: dict[str, torch.Tensor] = {}
        for number, file in enumerate(self.files, start=1):
            tensors |= load_file(file)
            logger.info("weights of this rank: %d of %d files read", number, len(self.files))
        if self.quantization is not None:
            smoothed = {name.removesuffix(".smoothing") for name in tensors if name.endswith(".smoothing")}
            insert_empty_layers(model, smoothed)
        try:
            model.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise ModelLoadError(f"{self.files[0].parent}: the weights do not fit the model: {error}") from error


def find_shards(path: str, options: DeepSpeedOptions, rank: Rank) -> Shards | None:
    """Return the weights that option.checkpoint names for `rank`; None without the option, or for a whole model.

    Raises ModelLoadError if the manifest cannot be read, or was made for another number of ranks or another data type.
    """
    if options.checkpoint is None:
        return None
    manifest = Path(path) / options.checkpoint
    try:
        content = read_manifest(manifest)
    except ValueError as error:
        raise ModelLoadError(f"option.checkpoint: {error}") from error
    if isinstance(content, WholeModel):
        return None
    if content.tp_size != rank.size:
        raise ModelLoadError(
            f"option.checkpoint: {manifest} was split for option.tensor_parallel_degree={content.tp_size}, but the"
            f" degree is {rank.size}; split the model again, or set the degree to {content.tp_size}"
        )
    if options.dtype != "auto" and LONG_DTYPES.get(options.dtype) != content.dtype:
        raise ModelLoadError(
            f"option.checkpoint: {manifest} is in {content.dtype}, but option.dtype={options.dtype}; set the data"
            " type of the checkpoint"
        )
    if content.dtype == "float16" and not usable_gpus().count:
        raise ModelLoadError(
            f"option.checkpoint: {manifest} is in float16, and DeepSpeed has no fp16 on the CPU; split the model again"
            " with option.dtype=bf16 or fp32"
        )
    files = tuple(manifest.parent / name for name in content.checkpoints.tp[rank.rank])
    return Shards(files, getattr(torch, content.dtype), content.quantization)


def save_shards(model: nn.Module, options: DeepSpeedOptions, rank: Rank, quantization: str | None) -> None:
    """Write the weights of this rank into the directory of option.save_mp_checkpoint_path; rank 0 adds the manifest.

    Raises ModelLoadError if the directory cannot be written.
    """
    assert options.save_mp_checkpoint_path is not None
    directory = Path(options.save_mp_checkpoint_path)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    count = len(list(_groups(tensors)))
    files = [[_file_name(other, number) for number in range(count)] for other in range(rank.size)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _save_tensors(directory, tensors, rank.rank)
        if rank.rank == 0:
            content = {
                "type": MANIFEST_TYPE,
                "version": 1.0,
                "parallelization": "tp",
                "tp_size": rank.size,
                "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
                "quantization": quantization,
                "checkpoints": {"tp": files},
            }
            (directory / SHARDS_MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"option.save_mp_checkpoint_path: {directory} cannot be written: {error}") from error


def _file_name(rank: int, number: int) -> str:
    return f"tp_{rank:02d}_{number:02d}.safetensors"


def _save_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    done = 0
    for number, names in enumerate(_groups(tensors)):
        # Copies, because safetensors refuses tensors that share memory, as tied weights do.
        save_file({name: tensors[name].clone() for name in names}, directory / _file_name(rank, number))
        done += sum(tensors[name].nbytes for name in names)
        logger.info("weights of rank %d: %.1f of %.1f MiB written", rank, done / 2**20, total / 2**20)


def _groups(names: Iterable[str]) -> Iterator[Sequence[str]]:
    """Yield the names of the tensors of each file. All ranks have the same names, and so the same files."""
    ordered = list(names)
    for first in range(0, len(ordered), _TENSORS_PER_FILE):
        yield ordered[first : first + _TENSORS_PER_FILE]

"""Loads a model for a whole task and splits it with DeepSpeed, or replaces its layers by DeepSpeed's kernels."""

from __future__ import annotations

import logging
from typing import Any

import torch

from handlers.checkpoints.gpus import own_gpu
from handlers.checkpoints.transformers_loading import load_config, set_threads
from handlers.deepspeed.initialization import check_before_loading, initialize
from handlers.deepspeed.int8 import quantize
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.logits import relative_error
from handlers.ranks.communicator import Communicator
from handlers.tasks import task_loading
from handlers.tasks.task import Task
from lmi_server.contract.errors import ModelLoadError
from lmi_server.machine.environment import own_rank

logger = logging.getLogger(__name__)

_INJECTED = ("bert", "bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "opt", "roberta", "xlm-roberta")
"""The model types for which LMI asks DeepSpeed for its kernels."""

# The largest accepted change of a model's output, relative to the spread of the output: float32 differs only in the
# order of sums; shorter data types round at other places. A wrong split changes nearly all of it.
_MAX_ERRORS = {torch.float32: 1e-3}
_MAX_ERROR = 0.25


def load_task(task: str, path: str, options: DeepSpeedOptions) -> tuple[Task, Communicator | None]:
    """Load the model in directory `path` for a task; return the task and the connection of its ranks, None on one.

    On a GPU DeepSpeed's kernels are tried for the model types that have them, and used if they do not change the
    model's output. Raises ModelLoadError if DeepSpeed cannot serve the model.
    """
    set_threads(options.threads)
    on_gpu = own_gpu(own_rank()) is not None
    config = load_config(path, options.reading())
    check_before_loading(config, options, own_rank().size)
    inject = on_gpu and config.model_type in _INJECTED and options.deepspeed_config_path is None
    loaded = task_loading.load_task(task, path, options.pipeline(task))
    if inject:
        try:
            return loaded, _initialize(loaded, options, inject=True)
        except ModelLoadError as error:
            logger.warning("served without DeepSpeed's kernels: %s", error.message)
            # DeepSpeed has changed the model in place: load it again.
            loaded = task_loading.load_task(task, path, options.pipeline(task))
    return loaded, _initialize(loaded, options, inject=False)


def _initialize(task: Task, options: DeepSpeedOptions, inject: bool) -> Communicator | None:
    before = _sample_output(task)
    communicator = initialize(task.model, options, own_rank(), inject)
    error = relative_error(_sample_output(task), before)
    if not error <= _MAX_ERRORS.get(task.model.dtype, _MAX_ERROR):  # NaN is an error too
        raise ModelLoadError(
            f"deepspeed.init_inference changes the output of {type(task.model).__name__} by {error:.2g} of its spread;"
            " set option.tensor_parallel_degree=1, or use djl_python.huggingface"
        )
    quantize(task.model, task.tokenizer, options)
    return communicator


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _sample_output(task: Task) -> torch.Tensor:
    """Return the model's output for a fixed text, to compare it before and after DeepSpeed has changed the model."""
    ids = task.tokenizer("The harbour's new cranes, 12 in all", return_tensors="pt")["input_ids"].to(task.model.device)
    more: dict[str, Any] = {"decoder_input_ids": ids} if task.model.config.is_encoder_decoder else {}
    found: torch.Tensor = task.model(input_ids=ids, **more)[0]
    return found.float().cpu()  # the model may come back on another device

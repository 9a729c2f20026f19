"""Tasks that are answered whole, of a model that DeepSpeed has split or put its kernels into."""

from __future__ import annotations

import logging
from typing import Any

import torch

from handlers.checkpoints.transformers_loading import load_config, set_threads
from handlers.deepspeed.initialization import check_before_loading, choose_device, initialize
from handlers.deepspeed.int8 import quantize
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.rolling_batch.communicator import Communicator
from handlers.tasks import task_loading
from handlers.tasks.task import Task
from lmi_server.contract.errors import ModelLoadError
from lmi_server.machine.environment import own_rank

_log = logging.getLogger(__name__)

_INJECTED = ("bert", "bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "opt", "roberta", "xlm-roberta")
"""Model types that DeepSpeed has kernels for, as far as LMI asked for them."""

_LIMITS = {torch.float32: 1e-3}
_LIMIT = 0.25  # of other data types


def load_task(task: str, path: str, options: DeepSpeedOptions) -> tuple[Task, Communicator | None]:
    """Load the model in directory `path` for a task; return the ranks that it is split over too.

    On a GPU DeepSpeed's kernels are used where the model gives the same with them. Raises ModelLoadError.
    """
    set_threads(options.threads)
    choose_device(own_rank())
    config = load_config(path, options.reading())
    check_before_loading(config, options, own_rank().size)
    wanted = torch.cuda.is_available() and config.model_type in _INJECTED and options.deepspeed_config_path is None
    loaded = task_loading.load_task(task, path, options.pipeline(task))
    if wanted:
        try:
            return loaded, _initialize(loaded, options, inject=True)
        except ModelLoadError as error:
            _log.warning("served without DeepSpeed's kernels: %s", error.message)
            # DeepSpeed has changed the model in place: load it again.
            loaded = task_loading.load_task(task, path, options.pipeline(task))
    return loaded, _initialize(loaded, options, inject=False)


def _initialize(task: Task, options: DeepSpeedOptions, inject: bool) -> Communicator | None:
    before = _sample(task)
    communicator = initialize(task.model, options, own_rank(), inject)
    spread = before - before.mean(dim=-1, keepdim=True)
    error = float((_sample(task) - before).norm() / spread.norm())
    if not error <= _LIMITS.get(task.model.dtype, _LIMIT):  # NaN is an error too
        raise ModelLoadError(
            f"{type(task.model).__name__} gives something else after deepspeed.init_inference, by {error:.2g} of the"
            " spread of what it gave before; set option.tensor_parallel_degree=1, or use djl_python.huggingface"
        )
    quantize(task.model, task.tokenizer, options)
    return communicator


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _sample(task: Task) -> torch.Tensor:
    """Return what the model gives for a text, to be compared."""
    ids = task.tokenizer("The harbour's new cranes, 12 in all", return_tensors="pt")["input_ids"].to(task.model.device)
    more: dict[str, Any] = {"decoder_input_ids": ids} if task.model.config.is_encoder_decoder else {}
    found: torch.Tensor = task.model(input_ids=ids, **more)[0]
    return found.float()

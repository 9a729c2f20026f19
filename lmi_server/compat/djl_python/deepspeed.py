"""The service of models that DeepSpeed splits, for subclasses and callers; it runs on this server's handler.

LMI had it up to 0.27.
"""

from __future__ import annotations

from typing import NoReturn

from djl_python.built_in_service import handle_with
from djl_python.inputs import Input
from djl_python.not_here import not_here
from djl_python.outputs import Output
from djl_python.task_service import TaskService


class DeepSpeedService(TaskService):
    """Answers whole requests, alone or in static batches."""

    entry_point = "djl_python.deepspeed"
    not_called = frozenset(
        {"_read_model_config", "_validate_model_type_and_task", "create_model_pipeline", "create_ds_module"}
        | {"format_input_for_rolling_batch", "get_model", "get_model_from_config", "get_model_pretrained"}
        | {"infer_task_from_model_architecture", "parse_input", "pipeline", "properties", "rolling_batch"}
    )


_service = DeepSpeedService()


def handle(inputs: Input) -> Output | None:
    return handle_with(_service, inputs)


def partition(inputs: Input) -> NoReturn:
    not_here("partition", "run lmi-server partition DIR, with option.save_mp_checkpoint_path in serving.properties")

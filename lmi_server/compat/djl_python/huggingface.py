"""The service of Hugging Face models, for code that calls or subclasses it; it runs on this server's handler.

`option.entryPoint=djl_python.huggingface` does not load this module: it chooses the handler itself.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, NoReturn

from djl_python.built_in_service import handle_with
from djl_python.inputs import Input
from djl_python.not_here import not_here
from djl_python.outputs import Output
from djl_python.task_service import TaskService

_ENDINGS = {
    "table-question-answering": ("TapasForQuestionAnswering",),
    "question-answering": ("ForQuestionAnswering",),
    "token-classification": ("ForTokenClassification",),
    "text-classification": ("ForSequenceClassification",),
    "multiple-choice": ("ForMultipleChoice",),
    "fill-mask": ("ForMaskedLM",),
    "text-generation": ("ForCausalLM", "GPT2LMHeadModel", "BloomModel"),
    "text2text-generation": ("ForConditionalGeneration", "MTModel", "EncoderDecoderModel", "T5WithLMHeadModel"),
}

ARCHITECTURES_2_TASK = {ending: task for task, endings in _ENDINGS.items() for ending in endings}
"""Tasks by what the name of an architecture ends with, for code to read; the server's own table is longer."""

FLASH_2_SUPPORTED_MODELS = {"LlamaForCausalLM", "RWForCausalLM", "FalconForCausalLM"}

_ADAPTERS = (
    "set option.entryPoint=djl_python.huggingface and option.enable_lora=true, and register adapters with POST"
    " /models/NAME/adapters"
)
_PEFT_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


class HuggingFaceService(TaskService):
    """Answers whole requests, alone or in static batches, with any task of a Hugging Face model."""

    entry_point = "djl_python.huggingface"
    not_called = frozenset(
        {"_dynamic_batch_inference", "_init_model", "_init_tokenizer", "_read_model_config"}
        | {"_streaming_inference", "adapter_registry", "add_lora", "format_input_for_rolling_batch"}
        | {"get_image_token", "get_input_format_args", "get_pipeline", "hf_configs", "hf_pipeline"}
        | {"hf_pipeline_unwrapped", "infer_task_from_model_architecture", "input_format_args"}
        | {"load_stopping_criteria_list", "parse_input", "parse_stop_sequence_input", "peft_config"}
        | {"pin_lora", "remove_lora", "rolling_batch", "stopping_criteria_list"}
        | {"wrap_text_generation_pipeline"}
    )


class StopWord:
    """A stopping criterion of transformers' generate(): the end of the first sequence matches a regular expression."""

    def __init__(self, tokenizer: Any, stop_seq: str) -> None:
        self.tokenizer = tokenizer
        self.stop_seq = stop_seq

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        # Most tokens are a character or more, so this many hold the whole sequence.
        end = self.tokenizer.decode(input_ids[0][-len(self.stop_seq) :])
        return re.search(self.stop_seq, end) is not None


def enable_flash() -> bool:
    """Return whether the GPU has what flash attention needs: NVIDIA's compute capability 8 or later."""
    cuda = importlib.import_module("torch").cuda
    return bool(cuda.is_available() and cuda.get_device_capability()[0] >= 8)


def get_rolling_batch_class_from_str(rolling_batch_type: str) -> type:
    """Return the class of a rolling batch. Raises ValueError for any name but `vllm`."""
    if rolling_batch_type != "vllm":
        raise ValueError(f"rolling batch {rolling_batch_type!r} is not allowed; allowed: vllm")
    batch: type = importlib.import_module("djl_python.rolling_batch.vllm_rolling_batch").VLLMRollingBatch
    return batch


_service = HuggingFaceService()


def handle(inputs: Input) -> Output | None:
    return handle_with(_service, inputs)


def register_adapter(inputs: Input) -> NoReturn:
    not_here("register_adapter", _ADAPTERS)


def update_adapter(inputs: Input) -> NoReturn:
    not_here("update_adapter", _ADAPTERS)


def unregister_adapter(inputs: Input) -> NoReturn:
    not_here("unregister_adapter", _ADAPTERS)


def __getattr__(name: str) -> Any:
    """Return the classes of transformers for tasks of peft, which import transformers and torch."""
    if name != "PEFT_MODEL_TASK_TO_CLS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    transformers = importlib.import_module("transformers")
    return {task: getattr(transformers, made) for task, made in _PEFT_CLASSES.items()}

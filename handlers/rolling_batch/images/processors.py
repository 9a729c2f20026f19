"""Loads the processor of a checkpoint: transformers' code that resizes images and writes their tokens into a prompt.

transformers' processors take videos and sounds as well, and some of their modules need packages for these alone
(torchvision, num2words). Here images are all that is read. So processors load without these packages, and Pillow
resizes images: in one thread, and to the same values on every machine.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import AutoImageProcessor, ProcessorMixin
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

_MODELS = "transformers.models"


def load_processor(path: str, model_type: str, tokenizer: Any, **origin: Any) -> Any:
    """Return the processor of the checkpoint at `path`, with its `tokenizer`.

    `origin` are further arguments of `from_pretrained`. Raises OSError, ValueError, ImportError, KeyError, TypeError or
    AttributeError if there is none, or if it needs what is not here.
    """
    settings, _ = ProcessorMixin.get_processor_dict(path, **origin)
    name = settings.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type)
    if not name:
        raise ValueError(f"transformers has no processor for the model type {model_type}")
    kind = _for_images_alone(_processor_class(name))
    image_processor = AutoImageProcessor.from_pretrained(path, backend="pil", **origin)
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    with _without_num2words(kind):
        processor = kind.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], settings)
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template  # older checkpoints have two
    return processor


def _processor_class(name: str) -> Any:
    module = next((module for module, names in PROCESSOR_MAPPING_NAMES.items() if name in names), None)
    if module is None:
        raise ValueError(f"transformers has no processor {name}")
    try:
        found = getattr(transformers, name, None)
    except ModuleNotFoundError:
        found = None
    if found is not None and not getattr(found, "is_dummy", False):
        return found
    folder = f"{_MODELS}.{model_type_to_module_name(module)}"
    return getattr(_import_without_torchvision(folder), name)


def _import_without_torchvision(folder: str) -> Any:
    """Import the module of a processor that takes a function from the torchvision form of an image processor.

    The form of Pillow has the same function.
    """
    model = folder.rpartition(".")[2]
    name = f"{folder}.image_processing_{model}"
    sys.modules[name] = importlib.import_module(f"{folder}.image_processing_pil_{model}")
    try:
        return importlib.import_module(f"{folder}.processing_{model}")
    finally:
        del sys.modules[name]


def _for_images_alone(kind: Any) -> Any:
    """Return a processor class that may lack the readers of videos and sounds."""

    class ImageProcessor(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return ImageProcessor


@contextmanager
def _without_num2words(kind: Any) -> Iterator[None]:
    """Let a processor begin without the package num2words, by which it describes videos."""
    module = vars(sys.modules[kind.__base__.__module__])
    missing = module.get("num2words", True) is None
    if missing:
        module["num2words"] = str
    try:
        yield
    finally:
        if missing:
            module["num2words"] = None

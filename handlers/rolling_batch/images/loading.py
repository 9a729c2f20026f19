"""Loads a checkpoint that reads images: its text model for the rolling batch, and what encodes its images."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText

from handlers.checkpoints.options import TransformersOptions
from handlers.checkpoints.transformers_loading import load_model
from handlers.rolling_batch.images.check import ImageCheck
from handlers.rolling_batch.images.encoder import ImageEncoder
from handlers.rolling_batch.images.intake import ImageModel
from handlers.rolling_batch.images.reader import ImageReader
from handlers.rolling_batch.images.text_model import TextModel
from lmi_server.contract.errors import describe, first_line, is_out_of_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedImages:
    """What encodes the images of a model, and the check of it once the model runs under the rolling batch."""

    model: ImageModel
    check: ImageCheck


def reads_images(config: Any) -> bool:
    """Return whether transformers has the model of a configuration as one for images and text."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and hasattr(config, "image_token_id")


def load_image_model(path: str, options: TransformersOptions) -> tuple[Any, TextModel]:
    """Return a model and the part of it that the rolling batch serves. Raises ModelLoadError."""
    model = load_model(AutoModelForImageTextToText, path, options)
    return model, TextModel(model)


def load_images(model: Any, path: str, tokenizer: Any, options: TransformersOptions) -> LoadedImages | str:
    """Return what encodes the images of a model; or why its images cannot be served, after a warning in the log."""
    try:
        # With it come transformers' modules for images, videos and sounds, 0.05 s that a model of text starts without.
        from handlers.rolling_batch.images.processors import load_processor

        origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
        processor = load_processor(path, model.config.model_type, tokenizer, **origin)
        encoder = ImageEncoder(model)
        reader = ImageReader(processor, encoder.token, getattr(model.base_model, "get_rope_index", None))
        check = ImageCheck(model, reader, encoder, model.config.get_text_config().vocab_size)
    # The border to the code of processors and models, which may need packages, files or steps not available here.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        name = type(model).__name__
        logger.warning("%s is served for text alone: its images cannot be read: %s", name, first_line(error))
        return describe(error)
    return LoadedImages(ImageModel(reader, encoder, check.both_ways), check)

"""The task of a model, as Hugging Face names it: from `option.task`, or from the architecture of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXT_GENERATION = "text-generation"
TEXT_EMBEDDING = "text-embedding"
TEXT_CLASSIFICATION = "text-classification"
POOLING = (TEXT_EMBEDDING, TEXT_CLASSIFICATION)
"""Tasks of models that make one vector or score of a text."""

_ALIASES = {"ner": "token-classification", "sentiment-analysis": TEXT_CLASSIFICATION}
# The first match counts, because some endings contain others.
_BY_BEGINNING = {
    "Tapas": "table-question-answering",
    "Whisper": "automatic-speech-recognition",
    "Speech2Text": "automatic-speech-recognition",
}
_BY_ENDING = {
    "T5WithLMHeadModel": "text2text-generation",
    "ForCausalLM": TEXT_GENERATION,
    "LMHeadModel": TEXT_GENERATION,
    "ModelWithLMHead": TEXT_GENERATION,  # Reformer
    "GenerationDecoder": TEXT_GENERATION,  # BERT
    "ForQuestionAnswering": "question-answering",
    "ForTokenClassification": "token-classification",
    "ForSequenceClassification": TEXT_CLASSIFICATION,
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "MTModel": "text2text-generation",
    "EncoderDecoderModel": "text2text-generation",
}
# ...ForConditionalGeneration alone says little: models of images and text end like that, too.
_TEXT_TO_TEXT = (
    *("Bart", "BigBirdPegasus", "Blenderbot", "FSMT", "LED", "LongT5", "M2M100", "MBart", "MT5", "Mvp", "NllbMoe"),
    *("PLBart", "Pegasus", "ProphetNet", "SeamlessM4T", "SwitchTransformers", "T5", "UMT5", "XLMProphetNet"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What a configuration asks for, as far as it decides between a handler and its variant.

    `task` is None if it is unknown, `rolling_batch` (in lower case) if the key is not given; `batches_statically` is
    true if requests are collected to batches that run together from start to end. `architectures` are those of the
    model if the handler's own rolling batch would serve it, and `config` is its config.json then.
    `use_stable_diffusion` and `max_model_len` are the values of these keys. `in_8_bits` is true if weights
    become 8 bits while they load.
    """

    task: str | None
    rolling_batch: str | None
    under_mpi: bool
    batches_statically: bool
    architectures: tuple[str, ...] = ()
    use_stable_diffusion: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    in_8_bits: bool = False


def canonical_task(name: Any) -> Any:
    """Return the canonical name of a task that has several names; anything else as it is."""
    return _ALIASES.get(name, name)


def infer_task(architectures: tuple[str, ...], location: str) -> str | None:
    """Return the task of a model with these architectures in directory `location`; None if it is unknown.

    A model with the files of sentence-transformers (modules.json) embeds texts, unless it is a classifier.
    """
    tasks = [task for name in architectures if (task := _task_of(name)) is not None]
    found = tasks[0] if tasks else None
    if found != TEXT_CLASSIFICATION and _is_sentence_transformer(location):
        return TEXT_EMBEDDING
    return found


def _task_of(architecture: str) -> str | None:
    for beginning, task in _BY_BEGINNING.items():
        if architecture.startswith(beginning):
            return task
    for ending, task in _BY_ENDING.items():
        if architecture.endswith(ending):
            return task
    if architecture.endswith("ForConditionalGeneration") and architecture.startswith(_TEXT_TO_TEXT):
        return "text2text-generation"
    return None


def _is_sentence_transformer(location: str) -> bool:
    path = Path(location) / "modules.json"
    return path.is_absolute() and path.is_file()

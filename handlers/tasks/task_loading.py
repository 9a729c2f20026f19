"""Chooses the class that runs a task, and loads the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from handlers.tasks.encoders.embedding import TextEmbedding
from handlers.tasks.encoders.encoder import FeatureExtraction
from handlers.tasks.options import SPEECH_RECOGNITION, PipelineOptions
from handlers.tasks.question_answering import QuestionAnswering
from handlers.tasks.speech.recognition import SpeechRecognition
from handlers.tasks.speech.whisper import Whisper
from handlers.tasks.task import Task
from handlers.tasks.text_tasks import TextGeneration, TextToText, Translation
from handlers.tasks.transformers_pipeline import TransformersPipeline, load_pipeline

_CLASSES: Mapping[str, Callable[[str, PipelineOptions], Task]] = {
    "text-embedding": TextEmbedding,
    "feature-extraction": FeatureExtraction,
    "question-answering": QuestionAnswering,
    "text-generation": TextGeneration,
}


def load_task(task: str, path: str, options: PipelineOptions) -> Task:
    """Return the task of this name, which the options allow, with the model in `path`. Raises ModelLoadError."""
    if task in _CLASSES:
        return _CLASSES[task](path, options)
    if task in ("text2text-generation", "summarization"):
        return TextToText(task, path, options)
    if task.startswith("translation"):
        return Translation(task, path, options)
    if task == SPEECH_RECOGNITION:
        return _load_speech(task, path, options)
    return TransformersPipeline(task, path, options)


def _load_speech(task: str, path: str, options: PipelineOptions) -> Task:
    pipeline = load_pipeline(task, path, options)
    return (Whisper if pipeline.type == "seq2seq_whisper" else SpeechRecognition)(pipeline, options)

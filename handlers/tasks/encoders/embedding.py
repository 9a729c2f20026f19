"""The task text-embedding: a vector per text, for requests in LMI's form and in OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from handlers.checkpoints.placement import main_device
from handlers.tasks.encoders.encoder import Encoder
from handlers.tasks.encoders.pooling import Pooler, read_layout
from handlers.tasks.options import PipelineOptions
from handlers.tasks.task import Task, same_names
from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.dialects import fields
from lmi_server.dialects.openai.embeddings import EmbeddingRequest


class Text(NamedTuple):
    """A text, or its token ids as they are, and the parameters of its request.

    `size` is the number of tokens that the text is cut to, -1 for the model's maximum; None refuses a longer text.
    `dimensions` is the length of the vector, None for the model's own.
    """

    content: str | tuple[int, ...]
    size: int | None
    dimensions: int | None
    normalize: bool


class Embedding(NamedTuple):
    """A float32 vector (dimensions,) and the number of tokens of its text."""

    vector: np.ndarray
    tokens: int


class TextEmbedding(Task):
    """Embeds texts with any encoder that transformers loads, and pools as the model's files or the options say."""

    parameters = same_names(truncate=fields.boolean, normalize=fields.boolean, dimensions=fields.integer(1))

    def __init__(self, path: str, options: PipelineOptions) -> None:
        layout = read_layout(Path(path))
        if options.pooling != "auto":
            layout = replace(layout, pooling=(options.pooling,))
        self._layout = layout
        self._normalize = options.normalize
        self._encoder = Encoder(path, options, layout.max_length)
        self._pool = Pooler(layout, main_device(self._encoder.model))
        self.model, self.tokenizer = self._encoder.model, self._encoder.tokenizer
        self.max_length = self._encoder.max_length
        self._vocabulary = self._encoder.model.get_input_embeddings().num_embeddings
        self._width = int(self._embed([self._encoder.tokenize(["a"])[0]]).shape[1])

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Text:
        if isinstance(value, list):
            value = fields.token_ids("inputs", value)
        if not isinstance(value, str | tuple) or value == ():
            raise fields.not_allowed("inputs", value, "send a string or token ids, or a list of them")
        return self._check(
            Text(
                value,
                -1 if parameters.get("truncate", False) else None,
                parameters.get("dimensions"),
                parameters.get("normalize", self._normalize),
            )
        )

    def read_openai(self, request: EmbeddingRequest) -> list[Text]:
        """Return the texts of a request in OpenAI's form. Raises RequestError."""
        return [
            self._check(Text(content, request.truncate_tokens, request.dimensions, self._normalize))
            for content in request.inputs
        ]

    def _check(self, text: Text) -> Text:
        if text.dimensions is not None and text.dimensions > self._width:
            raise fields.not_allowed("dimensions", text.dimensions, f"send at most {self._width}, the model's own")
        if not isinstance(text.content, str) and max(text.content) >= self._vocabulary:
            raise RequestError(f"token id {max(text.content)} is not allowed; the model has {self._vocabulary} tokens")
        return text

    def group_of(self, parameters: Mapping[str, Any]) -> Any:
        return "all"  # a Text carries the parameters of its request, so all requests run together

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Embedding | LmiServerError]:
        encoder = self._encoder
        sequences = [self._cut(ids, text.size) for text, ids in zip(inputs, self._ids(inputs), strict=True)]
        results: list[Embedding | LmiServerError] = [encoder.misfit_error(ids) for ids in sequences]
        for indices in encoder.batches(sequences):
            vectors = self._embed([sequences[index] for index in indices])
            for index, vector in zip(indices, vectors, strict=True):
                text = inputs[index]
                cut = vector[: text.dimensions]
                results[index] = Embedding(_of_length_one(cut) if text.normalize else cut, len(sequences[index]))
        return results

    def to_plain(self, result: Embedding) -> Any:
        return result.vector

    def details(self) -> Mapping[str, Any]:
        pooling = "+".join(self._layout.pooling)
        return {**super().details(), "max_length": self.max_length, "pooling": pooling, "dimensions": self._width}

    def _cut(self, ids: Sequence[int], size: int | None) -> Sequence[int]:
        if size is None:
            return ids
        return self._encoder.cut(ids, self.max_length if size == -1 else min(size, self.max_length))

    def _ids(self, inputs: Sequence[Text]) -> Sequence[Sequence[int]]:
        """Return the token ids of each text."""
        texts = [self._prepare(text.content) for text in inputs if isinstance(text.content, str)]
        are_cut = [text.size is not None for text in inputs if isinstance(text.content, str)]
        tokenized = iter(self._encoder.tokenize_unless_too_long(texts, are_cut))
        return [next(tokenized) if isinstance(text.content, str) else text.content for text in inputs]

    def _prepare(self, text: str) -> str:
        text = self._layout.prompt + text
        return text.lower() if self._layout.lower_case else text

    def _embed(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Return float32 vectors (sequences, width) of sequences that run together."""
        with torch.inference_mode():
            vectors: np.ndarray = self._pool(*self._encoder.hidden_states(sequences)).cpu().numpy()
        return vectors


def _of_length_one(vector: np.ndarray) -> np.ndarray:
    return vector / np.float32(max(float(np.sqrt(np.dot(vector, vector))), 1e-12))

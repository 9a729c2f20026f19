"""Extractive question answering: finds the part of a context that answers a question.

A context that is too long for the model is cut into overlapping windows, each a row of a batch. Transformers 5 has no
pipeline for this task; scores and parameters follow the pipeline of transformers 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForQuestionAnswering

from handlers.checkpoints.placement import main_device
from handlers.checkpoints.transformers_loading import load_model
from handlers.tasks.batches import even_batches
from handlers.tasks.options import PipelineOptions
from handlers.tasks.padding import load_padding_tokenizer
from handlers.tasks.task import Task, read_object, read_text, same_names
from lmi_server.contract.errors import ModelLoadError
from lmi_server.dialects import fields

_MAX_WINDOW = 384  # tokens of question and context together; the models were trained with it
_STRIDE = 128  # tokens that neighbouring windows share
_MAX_QUESTION = 64
_MAX_ANSWER = 15
_MAX_TOKENS = 16384  # of one forward pass, padding included

_COUNT = fields.integer(1)


class Span(NamedTuple):
    """A possible answer: its score and its characters in the context; `start == end` means "no answer"."""

    score: float
    start: int
    end: int


class _Window(NamedTuple):
    owner: int  # the index of its input
    ids: list[int]
    type_ids: list[int]
    offsets: list[tuple[int, int]]
    in_context: np.ndarray  # (tokens,) of bool
    classifier: int  # the index of the token that stands for "no answer"


class QuestionAnswering(Task):
    """Finds answers with a model that scores each token as the start and as the end of an answer."""

    parameters = same_names(
        top_k=_COUNT,
        doc_stride=_COUNT,
        max_answer_len=_COUNT,
        max_seq_len=_COUNT,
        max_question_len=_COUNT,
        handle_impossible_answer=fields.boolean,
        align_to_words=fields.boolean,
    )
    object_fields = ("question", "context")

    def __init__(self, path: str, options: PipelineOptions) -> None:
        self.tokenizer = load_padding_tokenizer(path, options)
        if not self.tokenizer.is_fast:
            raise ModelLoadError(
                "question-answering needs a fast tokenizer (tokenizer.json), which knows the characters of a token"
            )
        self.model = load_model(AutoModelForQuestionAnswering, path, options)
        positions = getattr(self.model.config, "max_position_embeddings", None) or 10**9
        self.max_length = min(options.max_model_len or positions, positions, self.tokenizer.model_max_length)

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Mapping[str, str]:
        found = read_object(value, self.object_fields)
        return {name: read_text(found[name]) for name in self.object_fields}

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        windows = [window for index, item in enumerate(inputs) for window in self._windows(index, item, parameters)]
        spans: list[list[Span]] = [[] for _ in inputs]
        unanswered = [1.0] * len(inputs)
        longest = int(parameters.get("max_answer_len", _MAX_ANSWER))
        count = int(parameters.get("top_k", 1))
        for batch in even_batches([len(window.ids) for window in windows], _MAX_TOKENS, main_device(self.model).type):
            rows = [windows[index] for index in batch]
            for window, start, end in zip(rows, *self._probabilities(rows), strict=True):
                unanswered[window.owner] = min(
                    unanswered[window.owner], float(start[window.classifier] * end[window.classifier])
                )
                spans[window.owner] += _best_spans(window, start, end, longest, count)
        words = parameters.get("align_to_words", True)
        impossible = parameters.get("handle_impossible_answer", False)
        return [
            _answers(item["context"], [*found, Span(null, 0, 0)] if impossible else found, count, words)
            for item, found, null in zip(inputs, spans, unanswered, strict=True)
        ]

    def details(self) -> Mapping[str, Any]:
        return {"model": type(self.model).__name__, "device": str(main_device(self.model))}

    def _windows(self, owner: int, item: Mapping[str, str], parameters: Mapping[str, Any]) -> list[_Window]:
        tokenizer = self.tokenizer
        size = min(int(parameters.get("max_seq_len", _MAX_WINDOW)), self.max_length)
        longest = min(int(parameters.get("max_question_len", _MAX_QUESTION)), size // 2)
        question = tokenizer(item["question"], add_special_tokens=False)["input_ids"][:longest]
        cut = tokenizer.decode(question) if len(question) == longest else item["question"]
        stride = min(int(parameters.get("doc_stride", min(_STRIDE, size // 2))), max(1, size - len(question) - 8))
        # Models that pad on the left were trained with the context before the question.
        first = tokenizer.padding_side == "left"
        encoded = tokenizer(
            item["context"] if first else cut,
            cut if first else item["context"],
            truncation="only_first" if first else "only_second",
            max_length=size,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        return [
            _Window(
                owner,
                ids,
                type_ids,
                offsets,
                np.array([sequence == (0 if first else 1) for sequence in encoded.sequence_ids(index)]),
                ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0,
            )
            for index, (ids, type_ids, offsets) in enumerate(
                zip(encoded["input_ids"], encoded["token_type_ids"], encoded["offset_mapping"], strict=True)
            )
        ]

    def _probabilities(self, rows: Sequence[_Window]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return for each window the probabilities (tokens,) that a token starts and ends the answer.

        They are 0 for tokens outside the context.
        """
        names = self.tokenizer.model_input_names
        columns = {"input_ids": [row.ids for row in rows], "token_type_ids": [row.type_ids for row in rows]}
        padded = self.tokenizer.pad(
            {name: column for name, column in columns.items() if name in names or name == "input_ids"},
            return_tensors="pt",
            padding_side="right",
        )
        with torch.inference_mode():
            outputs = self.model(**padded.to(main_device(self.model)))
        return _softmax(outputs.start_logits, rows), _softmax(outputs.end_logits, rows)


def _softmax(logits: torch.Tensor, rows: Sequence[_Window]) -> list[np.ndarray]:
    scores = logits.float().cpu().numpy()
    found = []
    for row, score in zip(rows, scores, strict=True):
        allowed = row.in_context.copy()
        allowed[row.classifier] = True
        masked = np.where(allowed, score[: len(row.ids)], -np.inf)
        exponents = np.exp(masked - masked.max())
        found.append(exponents / exponents.sum())
    return found


def _best_spans(window: _Window, start: np.ndarray, end: np.ndarray, longest: int, count: int) -> list[Span]:
    """Return the `count` most probable spans of at most `longest` tokens inside the context."""
    inside = window.in_context
    pairs = np.outer(np.where(inside, start, 0), np.where(inside, end, 0))
    pairs = np.tril(np.triu(pairs), longest - 1)  # no end before its start, and none too far behind it
    best = np.argsort(-pairs, axis=None, kind="stable")[:count]
    return [
        Span(float(pairs[first, last]), window.offsets[first][0], window.offsets[last][1])
        for first, last in zip(*np.unravel_index(best, pairs.shape), strict=True)
        if pairs[first, last] > 0
    ]


def _answers(context: str, spans: Sequence[Span], count: int, words: bool) -> Any:
    """Return the best answer, or a list of the best if `count` is more than 1."""
    scores: dict[tuple[int, int], float] = {}
    for span in spans:
        place = _whole_words(context, span) if words else (span.start, span.end)
        scores[place] = max(scores.get(place, 0.0), span.score)  # a span in two overlapping windows counts once
    best = sorted(scores.items(), key=lambda entry: -entry[1])[:count]
    answers = [
        {"score": score, "start": start, "end": end, "answer": context[start:end]} for (start, end), score in best
    ]
    if count > 1:
        return answers
    return answers[0] if answers else {"score": 0.0, "start": 0, "end": 0, "answer": ""}


def _whole_words(context: str, span: Span) -> tuple[int, int]:
    """Return the start and end of the span, extended to whole words."""
    start, end = span.start, span.end
    if start == end:
        return start, end
    while start > 0 and not context[start - 1].isspace():
        start -= 1
    while end < len(context) and not context[end].isspace():
        end += 1
    return start, end

"""The segments that Whisper finds in a window, and how sure it is of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput


@dataclass(frozen=True)
class Scores:
    """Of the sequence of a window: the mean log probability of its tokens, and that of no speech at all."""

    avg_logprob: float
    no_speech_prob: float


@dataclass(frozen=True)
class Segment:
    """A part of a sound, with start and end in seconds, and its tokens; the first and the last may be times.

    `seek` is where the window begins, in frames of features. `token_times` are in seconds, None if they were not asked
    for. `text` is that of the segment, `window_text` of its whole window.
    """

    seek: int
    start: float
    end: float
    tokens: Any
    token_times: Any = None
    text: str = ""
    window_text: str = ""
    scores: Scores | None = None

    def plain(self, number: int, temperature: float) -> dict[str, Any]:
        """Return the segment as OpenAI's API writes it."""
        scores = self.scores or Scores(0.0, 0.0)
        return {
            "id": number,
            "seek": self.seek,
            "start": self.start,
            "end": self.end,
            "text": self.text,
            "tokens": self.tokens.tolist(),
            "temperature": temperature,
            "avg_logprob": scores.avg_logprob,
            "compression_ratio": compression_ratio(self.window_text),
            "no_speech_prob": scores.no_speech_prob,
        }


def compression_ratio(text: str) -> float:
    """Return how many times shorter zlib makes a text; it is high for a text that repeats itself."""
    data = text.encode(errors="replace")
    return len(data) / len(zlib.compress(data))


def certain_tokens(tokens: Sequence[int], first_time: int) -> int:
    """Return how many tokens of a window that is not at its end will stay, whatever follows.

    A time behind a time ends a segment. What follows the last of these ends may be computed again, in the
    next window. Without any of them all tokens stay.
    """
    times = [token >= first_time for token in tokens]
    ends = [index + 1 for index in range(len(times) - 1) if times[index] and times[index + 1]]
    return ends[-1] if ends else len(tokens)


def score(model: Any, encoded: Any, sequence: Any, begin: int, start_token: int, no_speech: int) -> Scores:
    """Return the scores of a window: `encoded` (1, positions, size), `sequence` (tokens,) with its prompt.

    `begin` is the length of the prompt. The probabilities are the model's own, before anything is suppressed.
    """
    outputs = BaseModelOutput(last_hidden_state=encoded)
    logits = model(encoder_outputs=outputs, decoder_input_ids=sequence[None, :-1]).logits[0].float()
    new = sequence[begin:]
    chosen = logits[begin - 1 :].log_softmax(-1).gather(1, new[:, None])
    at_start = int((sequence[:begin] == start_token).nonzero()[-1])
    return Scores(chosen.mean().item(), logits[at_start].softmax(-1)[no_speech].item())


def without_padding(sequence: Any, eos: int, pad: int) -> Any:
    """Return a sequence (tokens,) with one token of its end, if it has any, and no padding after it."""
    while len(sequence) > 1 and sequence[-1] == pad and (pad != eos or sequence[-2] == pad):
        sequence = sequence[:-1]
    return sequence


def join_tokens(segments: Sequence[Segment]) -> Any:
    """Return the tokens of segments, (tokens,)."""
    return torch.cat([torch.zeros(0, dtype=torch.long), *(segment.tokens for segment in segments)])

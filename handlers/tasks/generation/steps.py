"""What happens while generate() runs: its steps go to a stream, a client that leaves ends it, and texts grow."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation import BaseStreamer

from handlers.generation.detokenizer import IncrementalDetokenizer, StopMatcher
from lmi_server.contract.generation import FinishReason


class StopFlag(StoppingCriteria):
    """Ends a batch if its client has left."""

    def __init__(self) -> None:
        self.now = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.now, dtype=torch.bool, device=input_ids.device)


class StepQueue(BaseStreamer):
    """Puts the tokens of each step into a queue, as a list with one per sequence."""

    def __init__(self, tokens: queue.SimpleQueue[list[int] | None]) -> None:
        self._tokens = tokens
        self._is_prompt = True  # generate() puts the prompt first

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._tokens.put(value.reshape(-1).tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: the end of the future reports the end, also if generate() raises."""


class GrowingText:
    """The text of one sequence, token by token, up to its end or to a stop sequence."""

    def __init__(
        self, tokenizer: Any, before: Sequence[int], eos: frozenset[int], parameters: Mapping[str, Any]
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens=True)
        include_stop = parameters.get("include_stop_str_in_output", False)
        self._stop = StopMatcher(tuple(parameters.get("stop", ())), include_stop)
        self._eos = eos
        self.finish_reason: FinishReason = "length"  # unless something else ends it
        self.tokens = 0

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; "" after the end of the sequence, while others of the batch go on."""
        if self.finish_reason != "length":
            return ""
        self.tokens += 1
        if token in self._eos:
            self.finish_reason = "eos_token"
            return ""
        text, stopped = self._stop.feed(self._detokenizer.feed(token))
        if stopped:
            self.finish_reason = "stop_sequence"
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end of the batch."""
        text, _ = self._stop.feed(self._detokenizer.flush())
        return text + self._stop.flush()


def log_probs_of(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own log probability of each new token, (sequences, tokens), of what generate() returned."""
    sequences = torch.arange(len(tokens), device=tokens.device)
    beams = getattr(output, "beam_indices", None)  # which row of each step a sequence has come from
    steps = []
    for step, logits in enumerate(output.logits[: tokens.shape[1]]):
        rows = sequences if beams is None else beams[:, step].clamp_min(0)
        steps.append(logits[rows].float().log_softmax(-1)[sequences, tokens[:, step]])
    return torch.stack(steps, dim=1)

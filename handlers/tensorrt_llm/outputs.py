"""Turns TensorRT-LLM's results, which grow from step to step, into deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from handlers.generation.detokenizer import StopMatcher, TokenTexts
from handlers.generation.parameters import room_of
from lmi_server.contract.errors import HandlerError
from lmi_server.contract.generation import Delta, FinishReason, SamplingParameters, Token, TopToken, Usage


class Vocabulary(TokenTexts):
    """Makes tokens of TensorRT-LLM's ids and scores."""

    def token(self, token_id: int, scores: Mapping[int, Any] | float | None, alternatives: int) -> Token:
        """Return a token. `scores` are TensorRT-LLM's: its log probability, or those of several tokens by their ids.

        The chosen token is always among several, and need not be one of the most likely ones.
        """
        text, special = self.text(token_id), token_id in self.special_ids
        if not isinstance(scores, Mapping):
            return Token(token_id, text, scores, special)
        chosen = scores.get(token_id)
        ranked = sorted(scores.items(), key=lambda item: -item[1].logprob)[:alternatives]
        top = tuple(TopToken(other, self.text(other), entry.logprob) for other, entry in ranked)
        return Token(token_id, text, chosen and chosen.logprob, special, top, chosen and chosen.rank)


class DeltaBuilder:
    """Builds the deltas of one request.

    TensorRT-LLM yields the same object again and again, with all text and all tokens so far. It cuts off only complete
    stop sequences, so that text and tokens of the last step may be shorter than before. What may become a stop sequence
    is held back here until then.
    """

    def __init__(
        self,
        sampling: SamplingParameters,
        prompt_ids: Sequence[int],
        prompt_text: str,
        room: int,
        vocabulary: Vocabulary,
    ) -> None:
        """`room` is the number of tokens that the context has for the answer."""
        self._sampling = sampling
        self._prompt_ids = prompt_ids
        self._prompt_text: str | None = prompt_text
        self._room = room
        self._vocabulary = vocabulary
        self._stops = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._read = 0  # characters of the text that the matcher got
        self._sent = 0  # characters of the text that are in deltas
        self._tokens = 0

    def build(self, result: Any) -> Delta:
        """Return what the last step added. Raises HandlerError if TensorRT-LLM gave the request up."""
        output = result.outputs[0]
        tokens = self._new_tokens(output)
        reason, usage = None, None
        if result.finished:
            reason = self._finish_reason(output)
            usage = self._usage(result)
            text = output.text[self._sent :]
        else:
            text = self._stops.feed(output.text[self._read :])[0]
            self._read = len(output.text)
            self._sent += len(text)
        delta = Delta(text, tokens, reason, usage, stop_reason=output.stop_reason)
        if self._prompt_text is None:
            return delta
        about_prompt = {"prompt_text": self._prompt_text, "prompt_token_ids": self._prompt_ids}
        self._prompt_text = None
        return msgspec.structs.replace(delta, prompt_tokens=self._prompt_tokens(output), **about_prompt)

    def _new_tokens(self, output: Any) -> tuple[Token, ...]:
        first, ids = self._tokens, output.token_ids
        self._tokens = max(first, len(ids))
        scores = output.logprobs if self._sampling.logprobs is not None and output.logprobs else ()
        alternatives = self._sampling.logprobs or 0
        return tuple(
            self._vocabulary.token(ids[at], scores[at] if at < len(scores) else None, alternatives)
            for at in range(first, len(ids))
        )

    def _prompt_tokens(self, output: Any) -> tuple[Token, ...] | None:
        alternatives = self._sampling.prompt_logprobs
        if alternatives is None:
            return None
        # Nothing comes before the first token of a prompt, so that it has no log probability.
        scores = [None, *(output.prompt_logprobs or ())]
        return tuple(
            self._vocabulary.token(token, scores[at] if at < len(scores) else None, alternatives)
            for at, token in enumerate(self._prompt_ids)
        )

    def _usage(self, result: Any) -> Usage:
        cached = int(getattr(result, "cached_tokens", 0) or 0)
        return Usage(len(self._prompt_ids), self._tokens, cached, room=room_of(self._sampling, self._room))

    @staticmethod
    def _finish_reason(output: Any) -> FinishReason:
        match output.finish_reason:
            case "length":
                return "length"
            case "stop":
                return "eos_token" if output.stop_reason is None else "stop_sequence"
            case reason:
                raise HandlerError(f"TensorRT-LLM ended the request with finish reason {reason}")

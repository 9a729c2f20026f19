"""Turns vLLM's outputs into deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from handlers.generation.detokenizer import IncrementalDetokenizer, TokenTexts
from handlers.generation.parameters import room_of
from handlers.structured_output.limits import LABELS
from lmi_server.contract.errors import HandlerError, LmiServerError, RequestError
from lmi_server.contract.generation import Delta, FinishReason, SamplingParameters, Token, TopToken, Usage

# If the options leave the choice to vLLM, it compiles all constraints with the library of the first one, but checks
# each for its own.
_SIMPLER = (
    "make it simpler (fewer alternatives, no classes such as \\p{L}), or name another library in"
    ' option.structured_outputs_config, such as {"backend": "guidance"}'
)


class Vocabulary(TokenTexts):
    """Makes tokens of vLLM's ids and scores."""

    def token(self, token_id: int) -> Token:
        """Return the token without a log probability."""
        return Token(token_id, self.text(token_id), None, token_id in self.special_ids)

    def scored(self, token_id: int, logprobs: Mapping[int, Any], alternatives: int, text: str) -> Token:
        """Return the token with its log probability and the `alternatives` most likely tokens at its position.

        `text` is what it adds to the output. `logprobs` are vLLM's `Logprob`s by token id. They always include the
        chosen token, which need not be among the most likely ones.
        """
        chosen = logprobs[token_id]
        ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)[:alternatives]
        top = tuple(TopToken(other, entry.decoded_token or "", entry.logprob) for other, entry in ranked)
        return Token(token_id, text, chosen.logprob, token_id in self.special_ids, top, chosen.rank)


class _Decoder:
    """The tokenizer of an `IncrementalDetokenizer`; it keeps special tokens."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._decode(ids)


class DeltaBuilder:
    """Builds the deltas of one request from vLLM's outputs."""

    def __init__(
        self, sampling: SamplingParameters, parameters: Any, prompt_text: Callable[[], str], vocabulary: Vocabulary
    ) -> None:
        """`parameters` is `sampling` in vLLM's form; `prompt_text` is called once, for the first delta."""
        self.parameters = parameters
        self._sampling = sampling
        self._prompt_text: Callable[[], str] | None = prompt_text
        self._vocabulary = vocabulary
        self._completion_tokens = 0
        self._texts: IncrementalDetokenizer | None = None  # of the scored tokens

    def build(self, output: Any) -> Delta | LmiServerError:
        """Return the delta of one `RequestOutput` of vLLM, or the error that ends the request.

        The first delta also has what concerns the prompt; the last one has the finish reason and the usage.
        """
        completion = output.outputs[0]
        ids = completion.token_ids
        self._completion_tokens += len(ids)
        if completion.finish_reason is None:
            reason, usage = None, None
        else:
            ended = self._finish_reason(completion)
            if isinstance(ended, LmiServerError):
                return ended
            reason = ended
            room = room_of(self._sampling, self.parameters.max_tokens) if self._sampling.fit_context else None
            usage = Usage(
                len(output.prompt_token_ids), self._completion_tokens, output.num_cached_tokens or 0, room=room
            )
        tokens = self._tokens(output.prompt_token_ids, ids, completion)
        stop = completion.stop_reason
        transfer = {} if reason is None else _transfer_params(output)
        delta = Delta(completion.text, tokens, reason, usage, stop_reason=stop, transfer_params=transfer)
        if self._prompt_text is None:
            return delta
        text, self._prompt_text = self._prompt_text(), None
        ids, scored = tuple(output.prompt_token_ids), self._prompt_tokens(output)
        return msgspec.structs.replace(delta, prompt_text=text, prompt_tokens=scored, prompt_token_ids=ids)

    def _tokens(self, prompt: Sequence[int], ids: Sequence[int], completion: Any) -> tuple[Token, ...]:
        """Return the tokens of a completion; the texts of scored ones join to the output."""
        if completion.logprobs is None:
            return tuple(map(self._vocabulary.token, ids))
        if self._texts is None:
            self._texts = IncrementalDetokenizer(_Decoder(self._vocabulary.decode), prompt, skip_special_tokens=False)
        texts = [self._texts.feed(token) for token in ids]
        if texts and completion.finish_reason is not None:
            texts[-1] += self._texts.flush()
        alternatives = self._sampling.logprobs or 0
        return tuple(
            self._vocabulary.scored(token, entry, alternatives, text)
            for token, entry, text in zip(ids, completion.logprobs, texts, strict=True)
        )

    def _prompt_tokens(self, output: Any) -> tuple[Token, ...] | None:
        alternatives = self._sampling.prompt_logprobs
        if alternatives is None:
            return None
        # The first token of a prompt has no log probability: nothing comes before it. vLLM has None there.
        scores = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        texts = IncrementalDetokenizer.texts(_Decoder(self._vocabulary.decode), output.prompt_token_ids)
        return tuple(
            msgspec.structs.replace(self._vocabulary.token(token), text=text)
            if entry is None
            else self._vocabulary.scored(token, entry, alternatives, text)
            for token, entry, text in zip(output.prompt_token_ids, scores, texts, strict=True)
        )

    def _finish_reason(self, completion: Any) -> FinishReason | LmiServerError:
        match completion.finish_reason:
            case "length":
                return "length"
            case "stop":
                by_client = completion.stop_reason in (*self._sampling.stop, *self._sampling.stop_token_ids)
                return "stop_sequence" if by_client else "eos_token"
            case "repetition":
                return "stop_sequence"
            case "error" if self._sampling.structured_outputs is not None and not self._completion_tokens:
                # vLLM compiles it beside the running batch, and only its log says what is wrong.
                return RequestError(f"vLLM cannot compile {LABELS[self._sampling.structured_outputs.kind]}; {_SIMPLER}")
            case reason:
                return HandlerError(f"vLLM ended the request with finish reason {reason}")


def _transfer_params(output: Any) -> dict[str, Any]:
    """Return the parameters for a request that goes on elsewhere with this KV cache or these media."""
    found = {name: getattr(output, name, None) for name in ("kv_transfer_params", "ec_transfer_params")}
    return {name: value for name, value in found.items() if value is not None}

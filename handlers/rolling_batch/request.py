"""One request in the engine: its parameters, its output so far, and the deltas of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from handlers.generation.detokenizer import IncrementalDetokenizer, StopMatcher, TokenTexts
from handlers.generation.parameters import room_of
from handlers.rolling_batch.grammars import Grammar
from handlers.rolling_batch.sampling.chosen import Sampled
from handlers.rolling_batch.sampling.sampler import score
from handlers.rolling_batch.sampling.state import SamplingState
from handlers.rolling_batch.schedule.plan import Chunk, Sequence
from handlers.step_loop import Output
from lmi_server.contract.errors import HandlerError
from lmi_server.contract.generation import Delta, FinishReason, SamplingParameters, Token, TopToken, Usage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class Request:
    """A sequence with what its output needs. `emit` takes its deltas, or the error that ends it.

    `label` is what the client calls it, and names it in messages only: others may have the same one. `end_ids` are the
    tokens that end a sequence of the model, `texts` the texts of single tokens.
    """

    label: str
    sequence: Sequence
    parameters: SamplingParameters
    sampling: SamplingState
    tokenizer: Any
    texts: TokenTexts
    end_ids: frozenset[int]
    emit: Callable[[Output], None]
    prompt_text: str
    on_begin: Callable[[], None] | None = None
    grammar: Grammar | None = None
    detokenizer: IncrementalDetokenizer = field(init=False)
    stop: StopMatcher = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    scored_prompt: list[Sampled] = field(default_factory=list)  # the prompt's first tokens, if they are to be scored
    started: bool = False

    def __post_init__(self) -> None:
        prompt, parameters = self.sequence.tokens, self.parameters
        self.detokenizer = IncrementalDetokenizer(
            self.tokenizer, prompt, parameters.skip_special_tokens, self.texts.pieces
        )
        self.stop = StopMatcher(parameters.stop, parameters.include_stop_str_in_output)
        self.stop_ids = frozenset(parameters.stop_token_ids)
        if self.scores_prompt:
            self.scored_prompt.append(Sampled(prompt[0]))  # nothing comes before it, so it has no log probability

    @property
    def scores_prompt(self) -> bool:
        """Whether the tokens of the prompt get log probabilities."""
        return self.parameters.prompt_logprobs is not None

    def scores(self, chunk: Chunk) -> bool:
        """Whether tokens of a chunk still need log probabilities; after a retraction none do a second time."""
        return self.scores_prompt and not self.started and len(self.scored_prompt) <= chunk.end

    def score_prompt(self, first: int, logits: Tensor) -> None:
        """Score the tokens of the prompt from `first` on; `logits` has a row for each."""
        begin = len(self.scored_prompt)  # more than `first` if the request was retracted in between
        ids = self.sequence.tokens[begin : first + len(logits)]
        if ids:
            self.scored_prompt += score(logits[begin - first :], ids, [self.parameters.prompt_logprobs or 0] * len(ids))

    def accept(self, sampled: Sampled) -> Delta:
        """Take the first unknown token, and return its delta, with a finish reason if it is the last one.

        Raises RequestError if the grammar does not allow the token.
        """
        sequence, parameters = self.sequence, self.parameters
        if self.grammar is not None:
            self.grammar.accept(sampled.token)
        self.sampling.settle(sampled.token)
        sequence.settle(sampled.token)
        piece = self.detokenizer.feed(sampled.token)
        may_stop = sequence.known - sequence.prompt_len > parameters.min_tokens
        text, stopped = self.stop.feed(piece, may_stop)
        reason = self._finish_reason(sampled.token, stopped)
        if reason and not stopped:
            unfinished = self.detokenizer.flush()
            piece += unfinished
            tail, stopped = self.stop.feed(unfinished, may_stop)
            text += tail if stopped else tail + self.stop.flush()
            reason = "stop_sequence" if stopped else reason
        if reason:
            sequence.drop_unknown()
        delta = Delta(
            text,
            (self._token(sampled, piece),),
            reason,
            self._usage() if reason else None,
            stop_reason=(self.stop.found or sampled.token) if reason == "stop_sequence" else None,
        )
        return delta if self.started else self._begun(delta)

    def _begun(self, delta: Delta) -> Delta:
        """Return the first delta with what concerns the prompt."""
        self.started = True
        self.sequence.may_reuse_prefix = True  # the prompt has been scored, and need not be computed in full again
        return replace(
            delta,
            prompt_text=self.prompt_text,
            prompt_tokens=self._prompt_tokens() if self.scores_prompt else None,
            prompt_token_ids=self.sequence.tokens[: self.sequence.prompt_len],
        )

    def overflow(self, dtype: Any) -> HandlerError:
        """Return the error of a request whose logits are not finite."""
        part = "the model" if self.sequence.adapter is None else "the adapter"
        name = str(dtype).removeprefix("torch.")
        wider = "set option.dtype=fp32 or bf16, or " if name == "float16" else ""
        return HandlerError(
            f"{part} computed no finite numbers for this request in {name}: its values overflow, or its weights are"
            f" broken; {wider}use other weights"
        )

    def _finish_reason(self, token: int, stopped: bool) -> FinishReason | None:
        if stopped or token in self.stop_ids:
            return "stop_sequence"
        if token in self.end_ids and not self.parameters.ignore_eos:
            return "eos_token"
        if self.grammar is not None and self.grammar.is_complete:
            return "eos_token"
        sequence = self.sequence
        return "length" if sequence.known - sequence.prompt_len >= sequence.max_new_tokens else None

    def _usage(self) -> Usage:
        sequence = self.sequence
        room = room_of(self.parameters, sequence.max_new_tokens)
        return Usage(sequence.prompt_len, sequence.generated, sequence.cached, room=room)

    def _prompt_tokens(self) -> tuple[Token, ...]:
        """Return the scored tokens of the prompt, whose texts join to its text."""
        texts = IncrementalDetokenizer.texts(self.tokenizer, [entry.token for entry in self.scored_prompt])
        return tuple(self._token(entry, text) for entry, text in zip(self.scored_prompt, texts, strict=True))

    def _token(self, sampled: Sampled, text: str) -> Token:
        top = tuple(TopToken(token, self.texts.text(token), logprob) for token, logprob in sampled.top)
        return Token(sampled.token, text, sampled.logprob, sampled.token in self.texts.special_ids, top)

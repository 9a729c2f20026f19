"""The rolling batch engine: one `step` decodes a token of every sequence and computes a bounded chunk of prompts."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from handlers.rolling_batch.detokenizer import IncrementalDetokenizer, StopMatcher
from handlers.rolling_batch.lora.layers import LoraPair, LoraWeights
from handlers.rolling_batch.prompts import PromptEncoder
from handlers.rolling_batch.runner.step_runner import StepLogits, StepRunner
from handlers.rolling_batch.sampler import NO_TOKEN, BannedTokens, Sampled, SamplingState, TokenMask, sample, score
from handlers.rolling_batch.schedule.scheduler import Chunk, Scheduler, Sequence, StepPlan
from handlers.rolling_batch.speculation.drafting import Drafter
from handlers.rolling_batch.step_recorder import EngineStats, StepRecorder
from handlers.step_loop import EngineLostError, Output
from lmi_server.contract.errors import (
    ContextLengthError,
    HandlerError,
    RequestError,
    describe,
    failure_of,
    is_device_failure,
)
from lmi_server.contract.generation import Delta, FinishReason, SamplingParameters, Token, TopToken, Usage
from lmi_server.contract.quoting import excerpt

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_MAX_STOPS = 64
_MAX_BAD_WORDS = 128
_LONGEST_STOP = 1000  # characters; every token's text is searched for every stop sequence


class Grammar(TokenMask, Protocol):
    """What the output of one request must match (`handlers.structured_output.token_grammars.GrammarMatch`)."""

    is_stale: bool

    def fill(self) -> None:
        """Compute the mask for the next token; runs in another thread while the model computes."""
        ...

    def accept(self, token: int) -> None:
        """Go on by a token. Raises RequestError if the grammar does not allow it."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end of the sequence."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    """A sequence with what its output needs. `emit` takes its deltas, or the error that ends it.

    `label` is what the client calls it, and names it in messages only: others may have the same one.
    """

    label: str
    sequence: Sequence
    parameters: SamplingParameters
    sampling: SamplingState
    detokenizer: IncrementalDetokenizer
    stop: StopMatcher
    emit: Callable[[Output], None]
    prompt_text: str
    prompt_tokens: list[Token] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    started: bool = False
    on_begin: Callable[[], None] | None = None
    grammar: Grammar | None = None


class RollingBatchEngine:
    """The engine that a `StepLoop` steps. It is not thread-safe: every call comes from the loop's thread.

    It numbers the requests that it gets. A fault in what concerns one of them alone ends that one; a fault in what all
    of a step share raises, and `fail_running` ends them.
    """

    def __init__(
        self, runner: StepRunner, scheduler: Scheduler, tokenizer: Any, eos_ids: frozenset[int], max_len: int
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._eos_ids = eos_ids
        self._max_len = max_len
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}  # by number: those that the scheduler has, too
        self._grammars: dict[int, Grammar] = {}  # of the requests that have one
        self._mask_thread = ThreadPoolExecutor(1, "grammar-masks")
        self._recorder = StepRecorder(scheduler)
        self._drafter: Drafter | None = None
        self._clock: Callable[[], float] = time.perf_counter

    def speculate(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        """Draft tokens for the requests to come. The drafter learns from `clock`, in seconds, how long steps take."""
        self._drafter, self._clock = drafter, clock

    @property
    def vocabulary(self) -> int:
        """How many logits a row has."""
        return self._runner.vocabulary

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a sequence."""
        return self._eos_ids

    @property
    def stats(self) -> EngineStats:
        return self._recorder.stats

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def _checked_length(self, prompt: list[int], parameters: SamplingParameters) -> int:
        """Return how many tokens the request may generate. Raises what `add` raises."""
        if not prompt:
            raise RequestError("the prompt has no tokens; send at least one character")
        room = min(self._max_len, self._scheduler.limits.kv_tokens) - len(prompt)
        wanted = parameters.max_new_tokens if parameters.max_new_tokens is not None else max(room, 1)
        if parameters.fit_context and room > 0:
            wanted = min(wanted, room)
        if wanted > room:
            raise ContextLengthError.from_counts(len(prompt), wanted, len(prompt) + room)
        if len(parameters.stop) > _MAX_STOPS or any(len(stop) > _LONGEST_STOP for stop in parameters.stop):
            raise RequestError(
                f"stop takes up to {_MAX_STOPS} sequences of up to {_LONGEST_STOP} characters each;"
                " send fewer or shorter ones"
            )
        if parameters.prompt_logprobs is not None and not self._runner.scores_prompts:
            raise RequestError(
                "the compiled graphs of this model give no log probabilities of prompt tokens; leave out"
                " decoder_input_details, prompt_logprobs, and echo with logprobs"
            )
        vocabulary = self._runner.vocabulary
        named = (
            min(prompt),
            max(prompt),
            *parameters.logit_bias,
            *parameters.stop_token_ids,
            *(parameters.allowed_token_ids or ()),
        )
        unknown = [token for token in named if not 0 <= token < vocabulary]
        if unknown:
            raise RequestError(f"token id {unknown[0]} is not in the vocabulary of {vocabulary} tokens")
        return wanted

    def add(
        self,
        label: str,
        prompt: list[int],
        parameters: SamplingParameters,
        prompt_text: str,
        priority: int,
        emit: Callable[[Output], None],
        adapter: LoraWeights | None = None,
        on_begin: Callable[[], None] | None = None,
        grammar: Grammar | None = None,
    ) -> int:
        """Queue a request, and return its number; `emit` gets its deltas from `step`.

        `label` names it in messages, and need not be unique. `step` calls `on_begin` once the request runs. `grammar`
        is the request's own, at its beginning.

        Raises ContextLengthError or RequestError if the request cannot be served at all.
        """
        wanted = self._checked_length(prompt, parameters)
        number = next(self._numbers)
        sequence = Sequence(number, list(prompt), len(prompt), wanted, priority, adapter)
        # Scoring a prompt takes the logits of all its tokens, so that none of them may come from another sequence.
        sequence.may_reuse_prefix = parameters.prompt_logprobs is None
        request = _Request(
            label,
            sequence,
            parameters,
            SamplingState(parameters, prompt, self._banned(parameters, grammar), grammar),
            IncrementalDetokenizer(self._tokenizer, prompt, parameters.skip_special_tokens),
            StopMatcher(parameters.stop, parameters.include_stop_str_in_output),
            emit,
            prompt_text,
            [self._token(Sampled(prompt[0]), self._piece(prompt[0]))] if parameters.prompt_logprobs is not None else [],
            frozenset(parameters.stop_token_ids),
            on_begin=on_begin,
            grammar=grammar,
        )
        self._scheduler.add(sequence)
        self._requests[number] = request
        if grammar is not None:
            self._grammars[number] = grammar
        elif self._drafter is not None:  # the masks of a grammar are computed for one token per step
            self._drafter.add(number, request.sampling)
        return number

    def _banned(self, parameters: SamplingParameters, grammar: Grammar | None) -> BannedTokens | None:
        """Return what a request must not generate; None, as for nearly every request, if it may generate anything.

        With `ignore_eos` a grammar goes on for as long as it can. Raises RequestError if nothing is left to generate.
        """
        allowed = parameters.allowed_token_ids
        if grammar is not None and parameters.ignore_eos:
            parameters = replace(parameters, ignore_eos=False, min_tokens=self._max_len)
        if allowed is None and not parameters.bad_words and not parameters.min_tokens:
            return None
        if allowed == ():
            raise RequestError("allowed_token_ids: a list of 0 is not allowed; send the ids of at least one token")
        if len(parameters.bad_words) > _MAX_BAD_WORDS:
            raise RequestError(f"bad_words takes up to {_MAX_BAD_WORDS} words; send fewer")
        words = [ids for word in parameters.bad_words for ids in self._spellings(word)]
        ends = parameters.stop_token_ids if parameters.ignore_eos else (*self._eos_ids, *parameters.stop_token_ids)
        return BannedTokens(allowed, words, ends, parameters.min_tokens)

    def _spellings(self, word: str) -> list[list[int]]:
        """Return the token ids of a word at the beginning and in the middle of a text, where they differ."""
        bare = word.lstrip()
        ids = [self._prompts.tokenize(text, add_special_tokens=False) for text in (bare, f" {bare}")]
        return [spelling for place, spelling in enumerate(ids) if spelling and spelling not in ids[:place]]

    def load_adapter(self, adapter: Mapping[str, LoraPair]) -> LoraWeights:
        """Lay out an adapter's weights for this model. Raises RequestError if they do not fit it."""
        self._runner.lora.check(adapter)
        return self._runner.lora.load(adapter)

    def check_adapter(self, adapter: Mapping[str, LoraPair]) -> None:
        """Raise RequestError if an adapter does not fit the model."""
        self._runner.lora.check(adapter)

    def forget_adapter(self, weights: LoraWeights) -> None:
        """Drop what is kept of an adapter; requests that run with it finish."""
        self._runner.lora.forget(weights)
        self._scheduler.forget(weights)

    def note_waiting(self, requests: int) -> None:
        """Note how many requests wait that were not added yet."""
        self._recorder.waiting_elsewhere = requests

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        self._recorder = StepRecorder(self._scheduler)

    def abort(self, number: int) -> None:
        """Forget a request; its slot is free for the next step. Requests that have ended are ignored."""
        request = self._requests.get(number)
        if request:
            self._forget(request)
            self._recorder.observe()

    def _forget(self, request: _Request, sound: bool = True) -> None:
        """Drop a request that has ended."""
        number = request.sequence.number
        del self._requests[number]
        self._grammars.pop(number, None)
        self._scheduler.remove(request.sequence, sound=sound)
        if self._drafter is not None:
            self._drafter.remove(number)

    def stop(self) -> None:
        """End the other ranks; nothing is computed any more."""
        self._mask_thread.shutdown()
        self._runner.stop()

    def step(self) -> None:
        """Run one forward pass and emit the deltas of its tokens."""
        self._recorder.begin()
        plan = self._scheduler.plan(self._drafter.propose if self._drafter is not None else None)
        for sequence in plan.started:
            on_begin = self._requests[sequence.number].on_begin
            if on_begin is not None:
                on_begin()
        began = self._clock()
        masks = self._begin_masks() if self._grammars else None
        logits = self._runner.run(plan, {chunk.sequence.number for chunk in plan.prefill if self._scores(chunk)})
        self._scheduler.advance(plan)
        self._score_prompts(logits)
        for number, error in masks.result().items() if masks is not None else ():
            self._end_alone(number, error)
        count = len(logits.sampled)
        self._choose(logits.sampled, logits.logits[:count])
        accepted = self._verify(plan, logits) if plan.drafts else 0
        if self._drafter is not None and plan.decode and not plan.prefill:
            rows = len(plan.decode) + sum(map(len, plan.drafts.values()))
            self._drafter.timed(rows, self._clock() - began)
        self._recorder.end(plan, count + accepted, accepted)

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Choose the next token of each sequence from its row of logits; emit it."""
        found = [self._requests.get(sequence.number) for sequence in sequences]
        requests = [request for request in found if request is not None]
        if len(requests) < len(found):  # what failed above has ended them
            logits = logits[[row for row, request in enumerate(found) if request is not None]]
        if requests:
            self._take(requests, logits)

    def _take(self, requests: list[_Request], logits: Tensor) -> None:
        for request, sampled in zip(requests, self._sampled(requests, logits), strict=True):
            if isinstance(sampled, BaseException):
                self._end_alone(request.sequence.number, sampled)
            elif sampled.token == NO_TOKEN:
                self._fail_overflown(request, logits.dtype)
            else:
                self._accept_or_fail(request, sampled)

    def _sampled(self, requests: list[_Request], logits: Tensor) -> SequenceOf[Sampled | BaseException]:
        """Return the token of each request, or what its parameters raise: they are tried one by one if any does."""
        try:
            return sample(logits, [request.sampling for request in requests])
        # The border to torch and to kernels: the parameters of one request must not end the others.
        except BaseException as error:
            if is_device_failure(error):
                raise
            if len(requests) == 1:
                return [error]
        rows = [self._sampled([request], logits[row : row + 1]) for row, request in enumerate(requests)]
        return [sampled for row in rows for sampled in row]

    def _verify(self, plan: StepPlan, logits: StepLogits) -> int:
        """Choose the tokens behind drafted ones, place by place, as long as the draft is right; return how many."""
        going = list(logits.draft_rows)
        total = 0
        for place in range(max(map(len, plan.drafts.values()))):
            going = [sequence for sequence in going if self._is_right(sequence, plan.drafts[sequence], place)]
            if not going:
                break
            for sequence in going:
                self._scheduler.draft_accepted(sequence)
            self._choose(going, logits.logits[[logits.draft_rows[sequence][place] for sequence in going]])
            total += len(going)
        return total

    def _is_right(self, sequence: Sequence, draft: list[int], place: int) -> bool:
        """Whether the request goes on and its newest token is the drafted one; the request learns when it is not."""
        if sequence.number not in self._requests or place >= len(draft):
            return False
        right = sequence.tokens[-1] == draft[place]
        if self._drafter is not None and (not right or place == len(draft) - 1):
            self._drafter.observe(sequence.number, len(draft), place + right)
        return right

    def _begin_masks(self) -> Future[dict[int, BaseException]]:
        """Compute, while the model computes, which tokens the grammars allow next; see `_fill` for the result."""
        stale = {number: grammar for number, grammar in self._grammars.items() if grammar.is_stale}
        return self._mask_thread.submit(_fill, stale)

    def fail_running(self, error: BaseException) -> None:
        """End every running request with an error after a step failed. Waiting requests stay in the queue.

        If none ran, it was the plan that failed, over those that wait: they end, because each further step would fail
        as well. The failed step may have written some of its keys and values, so that nothing of those slots is reused.
        Raises EngineLostError if the GPU failed, because every further step would fail as well.
        """
        if is_device_failure(error):
            raise EngineLostError(f"the device failed in a step: {describe(error)}") from error
        held = list(self._requests.values())
        for request in [entry for entry in held if entry.sequence.slot >= 0] or held:
            request.emit(failure_of(error, f"the step failed: {describe(error)}"))
            self._forget(request, sound=False)
        self._recorder.observe()

    def _end_alone(self, number: int, error: BaseException) -> None:
        """End a request by what failed for it alone. Requests that have ended are ignored."""
        request = self._requests.get(number)
        if request is None:
            return
        if not isinstance(error, RequestError):
            _log.error("request %s fails: %s", excerpt(request.label), describe(error), exc_info=error)
        request.emit(error if isinstance(error, RequestError) else failure_of(error))
        self._forget(request)

    def _scores(self, chunk: Chunk) -> bool:
        """Whether the chunk's prompt tokens get log probabilities; after a retraction not a second time."""
        request = self._requests[chunk.sequence.number]
        wanted = request.parameters.prompt_logprobs is not None and not request.started
        return wanted and len(request.prompt_tokens) <= chunk.end

    def _score_prompts(self, logits: StepLogits) -> None:
        for sequence, first, rows in logits.prompt_rows:
            try:
                self._score_prompt(self._requests[sequence.number], first, logits.logits[rows])
            # The border to torch and to tokenizers: the prompt of one request must not end the others.
            except BaseException as error:
                if is_device_failure(error):
                    raise
                self._end_alone(sequence.number, error)

    def _score_prompt(self, request: _Request, first: int, logits: Tensor) -> None:
        """Score the tokens of a prompt from `first` on; `logits` has a row for each."""
        begin = len(request.prompt_tokens)  # more than `first` if the request was retracted in between
        ids = request.sequence.tokens[begin : first + len(logits)]
        if not ids:
            return
        top = [request.parameters.prompt_logprobs or 0] * len(ids)
        scored = score(logits[begin - first :], ids, top)
        request.prompt_tokens.extend(self._token(entry, self._piece(entry.token)) for entry in scored)

    def _fail_overflown(self, request: _Request, dtype: Any) -> None:
        """End a request whose logits are not finite. Nothing of its slot is reused."""
        sequence = request.sequence
        self._forget(request, sound=False)
        part = "the model" if sequence.adapter is None else "the adapter"
        name = str(dtype).removeprefix("torch.")
        wider = "set option.dtype=fp32 or bf16, or " if name == "float16" else ""
        request.emit(
            HandlerError(
                f"{part} computed no finite numbers for this request in {name}: its values overflow, or its weights are"
                f" broken; {wider}use other weights"
            )
        )

    def _accept_or_fail(self, request: _Request, sampled: Sampled) -> None:
        try:
            self._accept(request, sampled)
        # A grammar may allow no token that the request's other parameters leave. All else is the border to tokenizers,
        # which may raise anything: the text of one request must not end the others.
        except BaseException as error:  # noqa: BLE001
            self._end_alone(request.sequence.number, error)

    def _accept(self, request: _Request, sampled: Sampled) -> None:
        """Append a token to its sequence and emit its delta; end the request if it is the last one."""
        sequence, parameters = request.sequence, request.parameters
        if request.grammar is not None:
            request.grammar.accept(sampled.token)
        sequence.tokens.append(sampled.token)
        piece = request.detokenizer.feed(sampled.token)
        may_stop = sequence.generated > parameters.min_tokens
        text, stopped = request.stop.feed(piece, may_stop)
        reason = self._finish_reason(request, sampled.token, stopped)
        if reason and not stopped:
            unfinished = request.detokenizer.flush()
            piece += unfinished
            tail, stopped = request.stop.feed(unfinished, may_stop)
            text += tail if stopped else tail + request.stop.flush()
            reason = "stop_sequence" if stopped else reason
        first, request.started = not request.started, True
        sequence.may_reuse_prefix = (
            True  # the prompt has been scored; after a retraction it need not be computed in full
        )
        delta = Delta(
            text,
            (self._token(sampled, piece),),
            reason,
            self._usage(request) if reason else None,
            request.prompt_text if first else None,
            self._prompt_tokens(request) if first and parameters.prompt_logprobs is not None else None,
            sequence.tokens[: sequence.prompt_len] if first else None,
            stop_reason=(request.stop.found or sampled.token) if reason == "stop_sequence" else None,
        )
        request.emit(delta)
        if reason:
            self._forget(request)

    @staticmethod
    def _usage(request: _Request) -> Usage:
        sequence, asked = request.sequence, request.parameters.max_new_tokens
        lowered = asked is not None and sequence.max_new_tokens < asked
        room = sequence.max_new_tokens if lowered else None
        return Usage(sequence.prompt_len, sequence.generated, sequence.cached, room=room)

    def _finish_reason(self, request: _Request, token: int, stopped: bool) -> FinishReason | None:
        parameters, sequence = request.parameters, request.sequence
        if stopped or token in request.stop_ids:
            return "stop_sequence"
        if token in self._eos_ids and not parameters.ignore_eos:
            return "eos_token"
        if request.grammar is not None and request.grammar.is_complete:
            return "eos_token"
        if sequence.generated >= sequence.max_new_tokens:
            return "length"
        return None

    def _token(self, sampled: Sampled, piece: str) -> Token:
        top = tuple(TopToken(token, self._piece(token), logprob) for token, logprob in sampled.top)
        return Token(sampled.token, piece, sampled.logprob, sampled.token in self._special_ids, top)

    def _prompt_tokens(self, request: _Request) -> tuple[Token, ...]:
        """Return the scored tokens of the prompt, whose texts join to its text."""
        texts = IncrementalDetokenizer.texts(self._tokenizer, [token.id for token in request.prompt_tokens])
        pairs = zip(request.prompt_tokens, texts, strict=True)
        return tuple(replace(token, text=text) for token, text in pairs)

    def _piece(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def _fill(grammars: Mapping[int, Grammar]) -> dict[int, BaseException]:
    """Compute masks; return the errors of the requests whose grammar failed, by number."""
    failed: dict[int, BaseException] = {}
    for number, grammar in grammars.items():
        try:
            grammar.fill()
        # The border to the library of grammars, in Rust: it may raise anything, and its panics are no Exceptions.
        except BaseException as error:  # noqa: BLE001
            failed[number] = error
    return failed

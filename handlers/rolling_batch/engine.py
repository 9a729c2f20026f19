"""The rolling batch engine: one `step` decodes a token of every sequence and computes a bounded chunk of prompts."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from handlers.generation.detokenizer import TokenTexts
from handlers.rolling_batch.admission import Admission
from handlers.rolling_batch.grammars import Grammar, GrammarMasks
from handlers.rolling_batch.lora.layers import LoraPair, LoraWeights
from handlers.rolling_batch.request import Request
from handlers.rolling_batch.runner.step_runner import StepLogits, StepRunner
from handlers.rolling_batch.sampling.sampler import NO_TOKEN, Sampled, sample
from handlers.rolling_batch.sampling.state import SamplingState
from handlers.rolling_batch.schedule.scheduler import Scheduler, Sequence, StepPlan
from handlers.rolling_batch.speculation.drafting import Drafter
from handlers.rolling_batch.step_recorder import EngineStats, StepRecorder
from handlers.step_loop import EngineLostError, Output
from lmi_server.contract.errors import RequestError, describe, failure_of, is_device_failure
from lmi_server.contract.generation import SamplingParameters
from lmi_server.contract.quoting import excerpt

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class RollingBatchEngine:
    """The engine that a `StepLoop` steps. It is not thread-safe: every call comes from the loop's thread.

    It numbers the requests that it gets. A fault that concerns one request ends that one alone. A fault that concerns a
    whole step raises, and `fail_running` ends its requests.
    """

    def __init__(
        self, runner: StepRunner, scheduler: Scheduler, tokenizer: Any, eos_ids: frozenset[int], max_len: int
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._texts = TokenTexts(lambda ids: str(tokenizer.decode(ids)), tokenizer.all_special_ids)
        self.vocabulary = runner.vocabulary  # logits of a row
        self.end_ids = eos_ids  # the tokens that end a sequence
        length = min(max_len, scheduler.limits.kv_tokens)
        self._admission = Admission(tokenizer, self.vocabulary, eos_ids, length, runner.scores_prompts)
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}  # by number, as long as the scheduler has them
        self._masks = GrammarMasks()
        self._recorder = StepRecorder(scheduler)
        self._drafter: Drafter | None = None
        self._clock: Callable[[], float] = time.perf_counter

    def speculate(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        """Draft tokens for the requests to come. The drafter learns from `clock`, in seconds, how long steps take."""
        self._drafter, self._clock = drafter, clock

    def force_ends(self, tokens: SequenceOf[int]) -> None:
        """Let one of `tokens` be the last of every output that is as long as its request allows."""
        self._admission.forced_ends = tokens

    @property
    def stats(self) -> EngineStats:
        return self._recorder.stats

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

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
        max_new_tokens = self._admission.max_new_tokens(prompt, parameters)
        sampling = SamplingState(
            parameters, prompt, self._admission.banned(parameters, grammar, max_new_tokens), grammar
        )
        number = next(self._numbers)
        sequence = Sequence(number, list(prompt), len(prompt), max_new_tokens, priority, adapter)
        # Scoring a prompt takes the logits of all its tokens, so that none of them may come from another sequence.
        sequence.may_reuse_prefix = parameters.prompt_logprobs is None
        request = Request(
            label,
            sequence,
            parameters,
            sampling,
            self._tokenizer,
            self._texts,
            self.end_ids,
            emit,
            prompt_text,
            on_begin,
            grammar,
        )
        self._scheduler.add(sequence)
        self._requests[number] = request
        if grammar is not None:
            self._masks.add(number, grammar)
        elif self._drafter is not None:  # the masks of a grammar are computed for one token per step
            self._drafter.add(number, sampling)
        return number

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

    def stop(self) -> None:
        """End the other ranks; nothing is computed any more."""
        self._masks.stop()
        self._runner.stop()

    def step(self) -> None:
        """Run one forward pass and emit the deltas of its tokens."""
        self._recorder.begin()
        plan = self._plan()
        began = self._clock()
        self._masks.begin()
        logits = self._runner.run(plan, self._prompts_to_score(plan))
        self._scheduler.advance(plan)
        self._score_prompts(logits)
        for number, error in self._masks.finish().items():
            self._end_alone(number, error)
        count = len(logits.sampled)
        self._choose(logits.sampled, logits.logits[:count])
        accepted = self._verify(plan, logits)
        self._time_drafts(plan, self._clock() - began)
        self._recorder.end(plan, count + accepted, accepted)

    def _plan(self) -> StepPlan:
        """Return what to compute next, and tell the requests that begin with it."""
        plan = self._scheduler.plan(None if self._drafter is None else self._drafter.propose)
        for sequence in plan.started:
            on_begin = self._requests[sequence.number].on_begin
            if on_begin is not None:
                on_begin()
        return plan

    # --- prompts ---

    def _prompts_to_score(self, plan: StepPlan) -> set[int]:
        """Return the numbers of the requests whose prompt tokens of this step get log probabilities."""
        numbers = (
            chunk.sequence.number for chunk in plan.prefill if self._requests[chunk.sequence.number].scores(chunk)
        )
        return set(numbers)

    def _score_prompts(self, logits: StepLogits) -> None:
        for sequence, first, rows in logits.prompt_rows:
            try:
                self._requests[sequence.number].score_prompt(first, logits.logits[rows])
            # The border to torch and to tokenizers: the prompt of one request must not end the others.
            except BaseException as error:
                if is_device_failure(error):
                    raise
                self._end_alone(sequence.number, error)

    # --- tokens ---

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Choose the next token of each sequence from its row of logits; emit it."""
        found = [self._requests.get(sequence.number) for sequence in sequences]
        requests = [request for request in found if request is not None]
        if len(requests) < len(found):  # what failed above has ended them
            logits = logits[[row for row, request in enumerate(found) if request is not None]]
        for request, sampled in zip(requests, _sample_each(requests, logits), strict=True):
            if isinstance(sampled, BaseException):
                self._end_alone(request.sequence.number, sampled)
            elif sampled.token == NO_TOKEN:
                self._forget(request, sound=False)  # nothing of its slot is reused
                request.emit(request.overflow(logits.dtype))
            else:
                self._accept(request, sampled)

    def _accept(self, request: Request, sampled: Sampled) -> None:
        """Append a token to its sequence and emit its delta; end the request if it is the last one."""
        try:
            delta = request.accept(sampled)
            request.emit(delta)
            if delta.finish_reason:
                self._forget(request)
        # A grammar may allow no token that the request's other parameters leave. All else is the border to tokenizers,
        # which may raise anything: the text of one request must not end the others.
        except BaseException as error:  # noqa: BLE001
            self._end_alone(request.sequence.number, error)

    # --- drafts ---

    def _verify(self, plan: StepPlan, logits: StepLogits) -> int:
        """Choose the tokens behind drafted ones, place by place, as long as the draft is right; return how many."""
        if not plan.drafts:
            return 0
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

    def _time_drafts(self, plan: StepPlan, seconds: float) -> None:
        """Tell the drafter how long a step without prompts took."""
        if self._drafter is not None and plan.decode and not plan.prefill:
            self._drafter.timed(len(plan.decode) + sum(map(len, plan.drafts.values())), seconds)

    # --- ends ---

    def fail_running(self, error: BaseException) -> None:
        """End every running request with an error after a step failed. Waiting requests stay in the queue.

        If none ran, planning failed over the waiting requests: they end, because each further step would fail as well.
        The failed step may have written some of its keys and values, so nothing of its slots is reused.
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
            logger.error("request %s fails: %s", excerpt(request.label), describe(error), exc_info=error)
        request.emit(error if isinstance(error, RequestError) else failure_of(error))
        self._forget(request)

    def _forget(self, request: Request, sound: bool = True) -> None:
        """Drop a request that has ended."""
        number = request.sequence.number
        del self._requests[number]
        self._masks.remove(number)
        self._scheduler.remove(request.sequence, sound=sound)
        if self._drafter is not None:
            self._drafter.remove(number)


def _sample_each(requests: list[Request], logits: Tensor) -> SequenceOf[Sampled | BaseException]:
    """Return the token of each request, or what its parameters raise: they are tried one by one if any does."""
    if not requests:
        return []
    try:
        return sample(logits, [request.sampling for request in requests])
    # The border to torch and to kernels: the parameters of one request must not end the others.
    except BaseException as error:
        if is_device_failure(error):
            raise
        if len(requests) == 1:
            return [error]
    rows = [_sample_each([request], logits[row : row + 1]) for row, request in enumerate(requests)]
    return [sampled for row in rows for sampled in row]

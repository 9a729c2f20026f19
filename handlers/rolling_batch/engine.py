"""The rolling batch engine: one `step` decodes a token of every sequence and computes a bounded chunk of prompts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from handlers.generation.detokenizer import TokenTexts
from handlers.generation.token_pieces import TokenPieces
from handlers.rolling_batch.admission import Admission
from handlers.rolling_batch.grammars import Grammar
from handlers.rolling_batch.lora.layers import LoraPair, LoraWeights
from handlers.rolling_batch.request import Request
from handlers.rolling_batch.requests.live import LiveRequests
from handlers.rolling_batch.requests.token_choice import ChosenTokens
from handlers.rolling_batch.requests.tokens import RequestTokens
from handlers.rolling_batch.runner.step_runner import StepLogits, StepRunner
from handlers.rolling_batch.sampling.state import SamplingState
from handlers.rolling_batch.schedule.images import PromptImages
from handlers.rolling_batch.schedule.plan import Sequence, StepPlan
from handlers.rolling_batch.schedule.prefix_tree import EVERY
from handlers.rolling_batch.schedule.scheduler import Scheduler
from handlers.rolling_batch.speculation.drafting import Drafter
from handlers.rolling_batch.speculation.verification import Verification
from handlers.rolling_batch.step_recorder import EngineStats, StepRecorder
from handlers.step_loop import EngineLostError, Output
from lmi_server.contract.errors import describe, failure_of, is_device_failure
from lmi_server.contract.generation import SamplingParameters


@dataclass(frozen=True)
class Flight:
    """A step that is computed, or still runs on a GPU: its tokens are told later. It began at `began`.

    `needs_tokens`: the next step can begin only when these tokens are known.
    """

    plan: StepPlan
    logits: StepLogits
    chosen: ChosenTokens
    began: float
    needs_tokens: bool


class RollingBatchEngine:
    """The engine that a `StepLoop` steps. It is not thread-safe: every call comes from the loop's thread.

    It numbers the requests that it gets. A fault of one request ends it alone. A fault that concerns a
    whole step raises, and `fail_running` ends its requests.

    A GPU computes while the host goes on. So the engine may run ahead: it begins a step before it tells the tokens of
    the one before, which stay on the device. A sequence that has ended meanwhile has a row in that step; its token is
    dropped. A grammar, a ban and a draft need the tokens first: while a request has one, no step begins early.
    """

    def __init__(
        self, runner: StepRunner, scheduler: Scheduler, tokenizer: Any, eos_ids: frozenset[int], max_len: int
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._texts = TokenTexts(
            lambda ids: str(tokenizer.decode(ids)), tokenizer.all_special_ids, TokenPieces(tokenizer)
        )
        self.vocabulary = runner.vocabulary  # logits of a row
        self.end_ids = eos_ids  # the tokens that end a sequence
        length = min(max_len, scheduler.limits.kv_tokens)
        self._admission = Admission(tokenizer, self.vocabulary, eos_ids, length, runner.scores_prompts)
        self._numbers = itertools.count(1)
        self._live = LiveRequests(scheduler)
        self._tokens = RequestTokens(self._live)
        self._recorder = StepRecorder(scheduler)
        self._runs_ahead = False
        self._flight: Flight | None = None  # the step whose tokens are told next
        self._clock: Callable[[], float] = time.perf_counter

    def speculate(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        """Draft tokens for the requests to come. The drafter learns from `clock`, in seconds, how long steps take."""
        self._live.drafter, self._clock = drafter, clock

    def run_ahead(self) -> None:
        """Begin steps before the tokens of the step before are known. `runner.run` gets these from the device."""
        self._runs_ahead = True

    def force_ends(self, tokens: tuple[int, ...]) -> None:
        """Let one of `tokens` be the last of every output that is as long as its request allows."""
        self._admission.forced_ends = tokens

    @property
    def stats(self) -> EngineStats:
        return self._recorder.stats

    @property
    def has_work(self) -> bool:
        return bool(self._live)

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
        images: PromptImages | None = None,
    ) -> int:
        """Queue a request, and return its number; `emit` gets its deltas from `step`.

        `label` names it in messages, and need not be unique. `step` calls `on_begin` once the request runs. `grammar`
        is the request's own, at its beginning. `images` are those of the prompt.

        Raises ContextLengthError or RequestError if the request cannot be served at all.
        """
        max_new_tokens = self._admission.max_new_tokens(prompt, parameters)
        sampling = SamplingState(
            parameters, prompt, self._admission.banned(parameters, grammar, max_new_tokens), grammar
        )
        number = next(self._numbers)
        sequence = Sequence(number, list(prompt), len(prompt), max_new_tokens, priority, adapter, images=images)
        # Scoring a prompt takes the logits of all its tokens, so that none of them may come from another sequence.
        sequence.may_reuse_prefix = parameters.prompt_logprobs is None
        sequence.shares_prefix = adapter is None or not adapter.is_forgotten
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
        self._live.add(request)
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

    def forget_prefixes(self) -> None:
        """Reuse nothing that was computed so far; requests that run finish."""
        self._scheduler.forget(EVERY)

    def note_waiting(self, requests: int) -> None:
        """Note how many requests wait that were not added yet."""
        self._recorder.waiting_elsewhere = requests

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        self._recorder = StepRecorder(self._scheduler)

    def abort(self, number: int) -> None:
        """Forget a request; its slot is free for the next step. Requests that have ended are ignored."""
        request = self._live.get(number)
        if request:
            self._live.forget(request)
            self._recorder.observe()

    def stop(self) -> None:
        """End the other ranks; nothing is computed any more."""
        self._live.masks.stop()
        self._runner.stop()

    def step(self) -> None:
        """Run one forward pass and emit the deltas of its tokens; if it runs ahead, those of the pass before."""
        self._recorder.begin()
        before, self._flight = self._flight, None
        if before is not None and not self._scheduler.goes_on:
            self._settle(before)
            before = None
        try:
            flight = self._launch(before) if self._live else None
        finally:
            if before is not None:
                self._settle(before)
        if flight is None:
            return
        if self._runs_ahead and not flight.needs_tokens:
            self._flight = flight
        else:
            self._settle(flight)

    def _launch(self, before: Flight | None) -> Flight | None:
        """Begin the next step; None if there is nothing to compute. The tokens of `before` may be unknown."""
        plan = self._plan()
        if not plan.decode and not plan.prefill:  # what went on was just retracted, and the others end
            return None
        began = self._clock()
        self._live.masks.begin()
        known = before.chosen.tokens if before is not None and before.chosen.requests else None
        logits = self._runner.run(plan, self._tokens.prompts_to_score(plan), known)
        self._scheduler.advance(plan)
        self._tokens.score_prompts(logits)
        for number, error in self._live.masks.finish().items():
            self._live.end_alone(number, error)
        chosen = self._tokens.choose(logits.sampled, logits.of_sampled(), known)
        needs_tokens = self._live.drafter is not None or any(entry.sampling.needs_tokens for entry in chosen.requests)
        return Flight(plan, logits, chosen, began, needs_tokens)

    def _settle(self, flight: Flight) -> None:
        """Emit the deltas of a step's tokens, once they are known."""
        plan = flight.plan
        count = self._tokens.tell(flight.chosen)
        check = Verification(plan, self._scheduler, self._live.drafter, lambda entry: entry.number in self._live)
        accepted = check.run(flight.logits, self._tokens.choose_and_tell)
        if self._live.drafter is not None and plan.decode and not plan.prefill:
            rows = len(plan.decode) + sum(map(len, plan.drafts.values()))
            self._live.drafter.timed(rows, self._clock() - flight.began)
        self._recorder.end(plan, count + accepted, accepted)

    def _plan(self) -> StepPlan:
        """Return the next step, and tell the requests that begin with it."""
        drafter = self._live.drafter
        plan = self._scheduler.plan(None if drafter is None else drafter.propose)
        if plan.retraction is not None:
            self._recorder.retracted(plan.retraction)
        for sequence in plan.started:
            on_begin = self._live.of(sequence).on_begin
            if on_begin is not None:
                on_begin()
        return plan

    # --- ends ---

    def fail_running(self, error: BaseException) -> None:
        """End every running request with an error after a step failed. Waiting requests stay in the queue.

        If none ran, planning failed over the waiting requests: they end, because each further step would fail as well.
        The failed step may have written some of its keys and values, so nothing of its slots is reused.
        Raises EngineLostError if the GPU failed, because every further step would fail as well.
        """
        if is_device_failure(error):
            raise EngineLostError(f"the device failed in a step: {describe(error)}") from error
        self._flight = None
        held = list(self._live)
        for request in [entry for entry in held if entry.sequence.is_begun] or held:
            request.emit(failure_of(error, f"the step failed: {describe(error)}"))
            self._live.forget(request, sound=False)
        self._recorder.observe()

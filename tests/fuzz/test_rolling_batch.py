"""Every request of a rolling batch gets its own text, whatever is added, aborted, retracted or fails around it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_helpers import read_adapter, save_adapter
from fuzzing import budget
from hypothesis import given
from hypothesis import strategies as st
from rolling_batch_helpers import EOS, GivenStepTimes, Received, generated
from tiny_models import CONTEXT, byte_tokenizer, tiny_model

from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.lora.layers import LoraLayers, LoraWeights
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.plan import StepPlan
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from handlers.rolling_batch.speculation.drafting import Speculation
from handlers.step_loop import AddRequest, StepLoop
from handlers.structured_output.grammar_text import grammar_text
from handlers.structured_output.token_grammars import GrammarMatch, TokenGrammars
from lmi_server.contract.errors import HandlerError, LmiServerError
from lmi_server.contract.generation import Delta, SamplingParameters, StructuredOutputs

pytestmark = pytest.mark.slow

MAX_NEW = 24
SLOTS = 4
KV_TOKENS = 170  # room for three or four of the prompts, and for less than their outputs
MAX_STEPS = 3000

_SHARED = [40 + place % 9 for place in range(24)]
PROMPTS: tuple[tuple[int, ...], ...] = (
    (1,),
    (5, 6, 7),
    tuple(_SHARED),
    (*_SHARED, 1, 2, 3),
    (*_SHARED[:20], *range(100, 130)),
    tuple(range(60, 100)),
)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "seed": 11},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "scored": {"prompt_logprobs": 1, "logprobs": 1},
    "digits": {},  # a grammar says so
    "adapted": {},  # by an adapter
}
FAULTS = ("fill", "accept", "mask")


class Broken:
    """A grammar that fails in one of its parts after some tokens, as a library may."""

    def __init__(self, match: GrammarMatch, part: str, after: int) -> None:
        self._match = match
        self._part = part
        self._left = after
        self.is_stale = True

    @property
    def mask(self) -> np.ndarray:
        if self._fails("mask"):
            raise LookupError("there is no mask")
        return self._match.mask

    def fill(self) -> None:
        if self._fails("fill"):
            raise LookupError("the mask cannot be computed")
        self._match.fill()
        self.is_stale = False

    def accept(self, token: int) -> None:
        if self._fails("accept"):
            raise LookupError("the token cannot be taken")
        self._match.accept(token)
        self._left -= 1
        self.is_stale = True

    @property
    def is_complete(self) -> bool:
        return self._match.is_complete

    def _fails(self, part: str) -> bool:
        return part == self._part and self._left <= 0


class StepFailedError(RuntimeError):
    """What a step raises that all of its requests share."""


class FailingRunner:
    """The runner of a model, which fails before or after it computes the next step if `fails` says so."""

    scores_prompts = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.vocabulary = runner.vocabulary
        self.fails: str | None = None

    @property
    def lora(self) -> LoraLayers:
        return self._runner.lora

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        fails, self.fails = self.fails, None
        if fails == "before":
            raise StepFailedError("before anything was computed")
        logits = self._runner.run(plan, prompt_scored, before)
        if fails == "after":
            raise StepFailedError("after everything was computed")
        return logits

    def stop(self) -> None:
        self._runner.stop()


class Lab:
    """A model with an adapter and a grammar, the engines over it, and what each request gets when it is alone."""

    def __init__(self, directory: Path) -> None:
        self.model = tiny_model("llama")
        with torch.no_grad():  # few tokens are left, so that outputs repeat themselves and drafts are right
            self.model.lm_head.weight[180:256] *= 0.2
        self.reference = tiny_model("llama")
        self.reference.load_state_dict(self.model.state_dict())
        adapter = read_adapter(str(save_adapter(self.model, directory)))
        self.tokenizer = byte_tokenizer()
        self.runner = ModelRunner(self.model, CONTEXT)
        self.runner.prepare(2 * SLOTS, CONTEXT)
        self.weights: LoraWeights = self.runner.lora.load(adapter)
        grammars = TokenGrammars(self.tokenizer, self.runner.vocabulary, [EOS])
        self._digits = grammars.compile(grammar_text(StructuredOutputs(kind="regex", value="[0-9]{30}")))
        self.alone = functools.cache(self._alone)

    def match(self) -> GrammarMatch:
        return GrammarMatch(self._digits)

    def batch(self, **limits: Any) -> Batch:
        return Batch(self, **limits)

    def _alone(self, way: str, prompt: tuple[int, ...]) -> Received:
        batch = self.batch(kv_tokens=CONTEXT)
        asked = batch.add(Ask(way, prompt, MAX_NEW))
        batch.drain()
        batch.engine.stop()
        assert asked.received.error is None
        return asked.received


@dataclass(frozen=True)
class Ask:
    """What a client asks for. `fault` is the part of its grammar that fails, after so many tokens."""

    way: str
    prompt: tuple[int, ...]
    length: int
    label: str = ""
    priority: int = 3
    fault: tuple[str, int] | None = None


@dataclass
class Asked:
    """A request in an engine. `kept` is how many deltas it had when its client left."""

    ask: Ask
    number: int = 0
    received: Received = field(default_factory=Received)
    kept: int | None = None


class Batch:
    """An engine whose steps are run as the step loop runs them."""

    def __init__(
        self, lab: Lab, *, kv_tokens: int = KV_TOKENS, chunk: int = 8, engine: str = "waits", policy: Any = "lpm"
    ) -> None:
        self._lab = lab
        self.runner = FailingRunner(lab.runner)
        limits = SchedulerLimits(SLOTS, kv_tokens, chunk, chunk, 2 * SLOTS, policy, conservativeness=0.05)
        self.scheduler = Scheduler(limits)
        self.engine = RollingBatchEngine(self.runner, self.scheduler, lab.tokenizer, frozenset({EOS}), CONTEXT)
        self.drafter = Speculation(4, GivenStepTimes(0.0)) if engine == "drafts" else None
        if engine == "runs ahead":
            self.engine.run_ahead()
        if self.drafter is not None:
            self.engine.speculate(self.drafter)
        self.asked: list[Asked] = []
        self.failed_steps = 0

    def add(self, ask: Ask) -> Asked:
        asked = Asked(ask)
        asked.number = self.give(ask, asked.received.take)
        self.asked.append(asked)
        return asked

    def give(self, ask: Ask, emit: Callable[[Delta | LmiServerError], None]) -> int:
        parameters = SamplingParameters(max_new_tokens=ask.length, **WAYS[ask.way])
        grammar: Any = None
        if ask.fault is not None:
            grammar = Broken(self._lab.match(), *ask.fault)
        elif ask.way == "digits":
            grammar = self._lab.match()
        adapter = self._lab.weights if ask.way == "adapted" else None
        prompt = list(ask.prompt)
        return self.engine.add(ask.label, prompt, parameters, "", ask.priority, emit, adapter, grammar=grammar)

    def abort(self, asked: Asked) -> None:
        self.engine.abort(asked.number)
        if asked.kept is None:
            asked.kept = len(asked.received.deltas)

    def fail(self, when: str) -> None:
        self.runner.fails = when

    def step(self) -> None:
        if not self.engine.has_work:
            return
        try:
            self.engine.step()
        except StepFailedError as error:  # the fault of a request never fails the step of the others
            self.failed_steps += 1
            self.engine.fail_running(error)

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                return
            self.step()
        pytest.fail(f"not everything ended in {MAX_STEPS} steps")

    def check(self) -> None:
        """Hold that every request got its own tokens, and that nothing is left of any."""
        for asked in self.asked:
            self._check(asked)
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.scheduler.slots._running
        assert not self.engine.has_work
        assert not self.engine._live.masks._grammars
        assert self.drafter is None or not self.drafter._lookups

    def _check(self, asked: Asked) -> None:
        ask, received = asked.ask, asked.received
        alone = self._lab.alone(ask.way, ask.prompt)
        expected = alone.tokens[: ask.length]
        assert received.tokens == expected[: len(received.tokens)], f"the tokens of another request: {ask}"
        texts = [delta.text for delta in received.deltas if delta.finish_reason is None]
        assert texts == [delta.text for delta in alone.deltas[: len(texts)]], f"the text of another request: {ask}"
        for delta in received.deltas[:1]:
            assert tuple(delta.prompt_token_ids or ()) == ask.prompt
            scored = [token.id for token in delta.prompt_tokens or ()]
            assert scored == (list(ask.prompt) if ask.way == "scored" else [])
        if received.error is not None:
            assert isinstance(received.error, HandlerError)
            assert ask.fault is not None or self.failed_steps, f"the error of another request: {ask}"
        elif asked.kept is not None and received.finish_reason is None:
            assert len(received.deltas) == asked.kept, "nothing comes for a client that has left"
        else:
            assert received.tokens == expected
            assert received.finish_reason is not None
            assert ask.fault is None or ask.fault[1] >= len(expected)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    found = Lab(tmp_path_factory.mktemp("adapter"))
    for prompt in PROMPTS:
        assert found.alone("greedy", prompt).tokens == generated(found.reference, list(prompt), MAX_NEW)
    return found


ASKS = st.builds(
    Ask,
    way=st.sampled_from(sorted(WAYS)),
    prompt=st.sampled_from(PROMPTS),
    length=st.integers(1, MAX_NEW),
    label=st.sampled_from(["mine", "mine", "yours", "cmpl-1-0-0"]),
    priority=st.sampled_from([3, 3, 3, 1]),
)
FAULTY_ASKS = st.builds(
    Ask,
    way=st.just("digits"),
    prompt=st.sampled_from(PROMPTS),
    length=st.integers(1, MAX_NEW),
    label=st.just("mine"),
    fault=st.tuples(st.sampled_from(FAULTS), st.integers(0, 5)),
)
EVENTS: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just("add"), ASKS),
    st.tuples(st.just("add"), ASKS),
    st.tuples(st.just("add"), FAULTY_ASKS),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("fail"), st.sampled_from(["before", "after"])),
)


def apply(batch: Batch, event: tuple[str, Any]) -> None:
    match event:
        case "add", ask:
            batch.add(ask)
        case "step", count:
            for _ in range(count):
                batch.step()
        case "abort", place:  # those that have ended, and numbers that no request has, among them
            if place < len(batch.asked):
                batch.abort(batch.asked[place])
            else:
                batch.engine.abort(10_000 + place)
        case "fail", when:
            batch.fail(when)


@budget(60)
@given(
    events=st.lists(EVENTS, min_size=4, max_size=40),
    chunk=st.sampled_from([3, 8, 64]),
    engine=st.sampled_from(["waits", "drafts", "runs ahead"]),
    policy=st.sampled_from(["lpm", "fcfs"]),
)
def test_every_request_gets_its_own_tokens_and_ends_once(
    lab: Lab, events: list[tuple[str, Any]], chunk: int, engine: str, policy: str
) -> None:
    batch = lab.batch(chunk=chunk, engine=engine, policy=policy)
    for event in events:
        apply(batch, event)
    batch.runner.fails = None
    batch.drain()
    batch.engine.stop()
    batch.check()


def test_the_examples_retract_requests(lab: Lab) -> None:
    batch = lab.batch(engine="drafts")
    for place in range(12):
        batch.add(Ask("greedy", PROMPTS[place % len(PROMPTS)], MAX_NEW, "mine"))
    batch.drain()
    batch.engine.stop()
    batch.check()
    assert batch.engine.stats.retracted_requests
    assert batch.engine.stats.cached_prompt_tokens
    assert batch.engine.stats.accepted_tokens


async def _read(loop: StepLoop[RollingBatchEngine], batch: Batch, asked: Asked, leaves_after: int) -> None:
    async def prepare() -> AddRequest:
        return lambda emit: batch.give(asked.ask, emit)

    try:
        async with aclosing(loop.generate(prepare)) as deltas:
            async for delta in deltas:
                asked.received.take(delta)
                if len(asked.received.deltas) == leaves_after:
                    break
    except HandlerError as error:
        asked.received.take(error)


async def _served(lab: Lab, asks: Sequence[tuple[Ask, int, int]], fails: Sequence[int], engine: str) -> Batch:
    """Serve requests from a step loop: each comes after some deltas of the first one, and leaves after some of its."""
    batch = lab.batch(engine=engine)
    loop = StepLoop(lambda: batch.engine)
    await loop.start()
    clients = []
    for number, (ask, pauses, leaves_after) in enumerate(asks):
        for _ in range(pauses):
            await loop.call(lambda: None)  # a step or more
        if number in fails:
            await loop.call(lambda: batch.fail("after"))
        asked = Asked(ask, kept=leaves_after)
        batch.asked.append(asked)
        clients.append(asyncio.create_task(_read(loop, batch, asked, leaves_after)))
    await asyncio.gather(*clients)
    batch.failed_steps = len(fails)
    await loop.call(batch.engine.stop)
    await loop.stop()
    return batch


@budget(15)
@given(
    asks=st.lists(
        st.tuples(st.one_of(ASKS, FAULTY_ASKS), st.integers(0, 6), st.integers(1, MAX_NEW)), min_size=2, max_size=10
    ),
    fails=st.lists(st.integers(0, 9), max_size=1),
    engine=st.sampled_from(["waits", "runs ahead"]),
)
def test_clients_that_come_and_leave_get_their_own_tokens(
    lab: Lab, asks: list[tuple[Ask, int, int]], fails: list[int], engine: str
) -> None:
    batch = asyncio.run(_served(lab, asks, fails, engine))
    batch.check()

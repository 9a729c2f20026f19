"""The engine tells requests apart by numbers of its own, and one request's fault ends that one alone."""

from __future__ import annotations

from typing import Any

import pytest
from rolling_batch_helpers import Engine, Received
from tiny_models import tiny_model

from lmi_server.contract.errors import HandlerError
from lmi_server.contract.generation import SamplingParameters

pytestmark = pytest.mark.slow


class WithoutToken:
    """A tokenizer that cannot decode one of its tokens."""

    def __init__(self, tokenizer: Any, token: int) -> None:
        self._inner = tokenizer
        self._token = token

    def decode(self, ids: list[int], **options: bool) -> str:
        if self._token in ids:
            raise LookupError("no such piece")
        return str(self._inner.decode(ids, **options))


class Unhashable:
    """An adapter that the scheduler cannot look up: what is wrong with it shows in the plan of a step."""

    is_forgotten = False

    def __hash__(self) -> int:
        raise LookupError("no hash")


def test_requests_with_one_label_are_told_apart() -> None:
    engine = Engine(tiny_model("llama"))
    asked = dict(engine.add([token, 2], max_new_tokens=9) for token in (5, 6, 7))
    assert len(asked) == 3
    engine.engine.step()
    first, second, third = asked
    engine.engine.abort(second)
    engine.engine.abort(second)
    engine.run()
    assert asked[first].tokens == engine.expected([5, 2], 9)
    assert asked[second].tokens == engine.expected([6, 2], 9)[:1]
    assert asked[third].tokens == engine.expected([7, 2], 9)


def test_a_prompt_that_cannot_be_scored_ends_its_request_alone() -> None:
    engine = Engine(tiny_model("llama"))
    scored = {"max_new_tokens": 4, "prompt_logprobs": 0}
    _, broken = engine.add([1, 77, 2], **scored)
    _, sound = engine.add([1, 76, 2], **scored)
    for request in engine.engine._live:
        request.tokenizer = WithoutToken(engine.tokenizer, 77)
    engine.run()
    assert "no such piece" in str(broken.error)
    assert sound.tokens == engine.expected([1, 76, 2], 4)
    assert [token.id for token in sound.deltas[0].prompt_tokens or ()] == [1, 76, 2]
    assert not engine.scheduler.slots._running


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_a_plan_that_fails_ends_what_waits_once_nothing_runs(policy: str) -> None:
    """With fcfs the first of those that wait has begun when the plan fails."""
    engine = Engine(tiny_model("llama"), policy=policy)
    waiting = [Received(), Received()]
    adapters: list[Any] = [None, Unhashable()]
    for adapter, answer in zip(adapters, waiting, strict=True):
        engine.engine.add("label", [5, 6], SamplingParameters(max_new_tokens=9), "", 3, answer.take, adapter)
    for _ in range(2):
        if engine.engine.has_work:
            with pytest.raises(LookupError, match="no hash") as raised:
                engine.engine.step()
            engine.engine.fail_running(raised.value)
    assert [type(answer.error) for answer in waiting] == [HandlerError, HandlerError]
    assert not engine.engine.has_work
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.generate([5, 6], max_new_tokens=9).tokens == engine.expected([5, 6], 9)

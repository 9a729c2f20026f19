"""An engine that runs ahead of what the host knows answers as one that waits for every token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rolling_batch_helpers import EOS, Engine, Received
from tiny_models import CONTEXT, tiny_model

from lmi_server.contract.generation import Usage

SHARED = [40 + place % 9 for place in range(24)]
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"do_sample": True, "seed": 3},
    {"do_sample": True, "seed": 4, "top_p": 0.8, "logprobs": 0},
    {"do_sample": True, "seed": 5, "top_k": 7, "temperature": 1.7},
    {"do_sample": True, "seed": 6, "typical_p": 0.7},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.9, "frequency_penalty": 0.5, "logprobs": 1},
    {"do_sample": True, "seed": 7, "repetition_penalty": 0.8, "frequency_penalty": 0.3, "min_p": 0.05},
    {"logit_bias": {65: 3.0}},
)
NEEDING_TOKENS: tuple[dict[str, Any], ...] = ({"min_tokens": 4}, {"bad_words": ("A", "BC")}, {"prompt_logprobs": 1})


class Asked:
    """A request of a random plan: when it comes, what it asks for, and after how many tokens its client goes away."""

    def __init__(self, chance: random.Random, ways: tuple[dict[str, Any], ...]) -> None:
        self.at = chance.randrange(30)
        shared = SHARED[: chance.choice((0, 0, 12, 24))]
        self.prompt = [*shared, *(chance.randrange(256) for _ in range(chance.choice((1, 2, 9, 30))))]
        self.parameters = {"max_new_tokens": chance.choice((1, 2, 3, 8, 24)), **chance.choice(ways)}
        if chance.random() < 0.3:
            self.parameters["stop_token_ids"] = tuple(chance.sample(range(256), 40))
        if chance.random() < 0.3:
            self.parameters["stop"] = tuple(chr(chance.randrange(32, 127)) for _ in range(6))
        self.parameters["ignore_eos"] = chance.random() < 0.5
        self.leaves_after = chance.choice((None, None, None, 0, 1, 3))


def served(asked: list[Asked], ahead: bool, **limits: Any) -> tuple[list[Received], Engine]:
    engine = Engine(tiny_model("llama"), slots=4, **limits)
    if ahead:
        engine.engine.run_ahead()
    waiting = sorted(range(len(asked)), key=lambda index: asked[index].at)
    answers: dict[int, tuple[int, Received]] = {}
    for step in range(3000):
        while waiting and asked[waiting[0]].at <= step:
            index = waiting.pop(0)
            answers[index] = engine.add(asked[index].prompt, **asked[index].parameters)
        for index, (number, answer) in answers.items():
            leaves = asked[index].leaves_after
            if leaves is not None and len(answer.tokens) >= leaves:
                engine.engine.abort(number)
        if engine.engine.has_work:
            engine.engine.step()
        elif not waiting:
            return [answers[index][1] for index in range(len(asked))], engine
    raise AssertionError("the engine does not end")


def logprobs(answer: Received) -> list[float]:
    tokens = [token for delta in answer.deltas for token in delta.tokens]
    return [value for token in tokens for value in (token.logprob, *(top.logprob for top in token.top)) if value]


def usage(answer: Received) -> Usage | None:
    """Return the usage without the cached tokens, which depend on when others end."""
    last = answer.deltas[-1].usage if answer.deltas else None
    return None if last is None else Usage(last.prompt_tokens, last.completion_tokens)


def assert_same(asked: Asked, ahead: Received, waited: Received) -> None:
    assert ahead.error is None
    assert waited.error is None
    count = min(len(ahead.tokens), len(waited.tokens)) if asked.leaves_after is not None else None
    assert ahead.tokens[:count] == waited.tokens[:count]
    assert logprobs(ahead)[:count] == pytest.approx(logprobs(waited)[:count], abs=1e-3)
    if count is None:
        assert ahead.text == waited.text
        assert ahead.finish_reason == waited.finish_reason
        assert ahead.deltas[-1].stop_reason == waited.deltas[-1].stop_reason
        assert usage(ahead) == usage(waited)
        assert usage(ahead) == Usage(len(asked.prompt), len(ahead.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ways", [WAYS, WAYS + NEEDING_TOKENS], ids=["ahead", "mixed"])
def test_random_requests_are_answered_alike(seed: int, ways: tuple[dict[str, Any], ...]) -> None:
    chance = random.Random(seed)
    asked = [Asked(chance, ways) for _ in range(14)]
    kv_tokens = chance.choice((170, 4 * CONTEXT))
    ahead, engine = served(asked, ahead=True, kv_tokens=kv_tokens, conservativeness=0.1)
    waited, _ = served(asked, ahead=False, kv_tokens=kv_tokens, conservativeness=0.1)
    for each, one, other in zip(asked, ahead, waited, strict=True):
        assert_same(each, one, other)
    assert engine.scheduler.running == []
    assert engine.scheduler.waiting == []


def test_retracted_sequences_keep_their_unknown_tokens() -> None:
    chance = random.Random(5)
    asked = [Asked(chance, WAYS[:1]) for _ in range(6)]
    for each in asked:
        each.at, each.leaves_after, each.parameters = 0, None, {"max_new_tokens": 40, "ignore_eos": True}
    ahead, engine = served(asked, ahead=True, kv_tokens=150, conservativeness=0.01)
    waited, _ = served(asked, ahead=False, kv_tokens=150, conservativeness=0.01)
    assert engine.engine.stats.retracted_requests > 0
    assert [answer.tokens for answer in ahead] == [answer.tokens for answer in waited]


def test_a_retraction_without_a_step_behind_it_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The one that goes on has no room for its next token, and the other one only waits for its last one."""
    engine = Engine(tiny_model("llama"), kv_tokens=38, chunk=64, conservativeness=0.05)
    engine.engine.run_ahead()
    answers = [
        engine.add(prompt, max_new_tokens=new)[1] for prompt, new in ((list(range(20)), 5), (list(range(10)), 20))
    ]
    engine.run()
    assert [len(answer.tokens) for answer in answers] == [5, 20]
    assert engine.engine.stats.retracted_requests == 1
    assert "#retracted_reqs: 1" in caplog.text


def test_a_step_begins_before_the_tokens_of_the_step_before_are_told() -> None:
    engine = Engine(tiny_model("llama"))
    engine.engine.run_ahead()
    _, answer = engine.add([1, 2, 3], max_new_tokens=4, ignore_eos=True)
    told = []
    engine.run(lambda: told.append(len(answer.tokens)))
    assert told == [0, 1, 2, 3, 4]
    assert engine.engine.stats.steps == 4  # none is computed behind the last token


def test_a_stop_that_is_seen_late_costs_a_row_and_no_token() -> None:
    engine = Engine(tiny_model("llama"))
    plain = engine.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    engine.engine.run_ahead()
    stopped = engine.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True, stop_token_ids=(plain.tokens[3],))
    assert stopped.tokens == plain.tokens[: plain.tokens.index(plain.tokens[3]) + 1]
    assert stopped.deltas[-1].usage is not None
    assert stopped.deltas[-1].usage.completion_tokens == len(stopped.tokens)
    again = engine.generate([1, 2, 3, *stopped.tokens], max_new_tokens=3, ignore_eos=True)
    assert again.tokens == plain.tokens[len(stopped.tokens) :][:3]


def test_a_failed_step_ends_what_ran_and_the_engine_goes_on() -> None:
    engine = Engine(tiny_model("llama"))
    engine.engine.run_ahead()
    expected = engine.generate([1, 2, 3], max_new_tokens=6, ignore_eos=True).tokens
    _, broken = engine.add([1, 2, 3], max_new_tokens=6, ignore_eos=True)
    engine.engine.step()
    engine.engine.step()
    engine.engine.fail_running(RuntimeError("shapes"))
    assert broken.error is not None
    assert engine.generate([1, 2, 3], max_new_tokens=6, ignore_eos=True).tokens == expected
    assert engine.generate([1, 2, EOS], max_new_tokens=2, ignore_eos=True).error is None

"""A prefix cache that is reset, and a KV cache whose memory is given back, change no answer."""

from __future__ import annotations

import random

import pytest
from rolling_batch_helpers import Engine
from tiny_models import tiny_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page", [None, 16])
def test_nothing_computed_before_a_reset_is_used_after_it(page: int | None) -> None:
    engine = Engine(tiny_model("llama"), page=page)
    prompt = [7] * 40
    expected = engine.expected(prompt, 5)
    assert engine.generate(prompt, max_new_tokens=5).tokens == expected
    assert engine.generate(prompt, max_new_tokens=5).tokens == expected
    reused = engine.engine.stats.cached_prompt_tokens
    assert reused > 0
    engine.engine.forget_prefixes()
    assert engine.scheduler.slots.cached_tokens == 0
    assert engine.generate(prompt, max_new_tokens=5).tokens == expected
    assert engine.engine.stats.cached_prompt_tokens == reused
    assert engine.generate(prompt, max_new_tokens=5).tokens == expected, "what came after the reset is reused"
    assert engine.engine.stats.cached_prompt_tokens > reused


def test_resets_while_requests_run_change_no_answer() -> None:
    chance = random.Random(5)
    engine = Engine(tiny_model("llama"))
    asked = [([3] * chance.randrange(20, 60) + [chance.randrange(200)], chance.randrange(1, 12)) for _ in range(12)]
    answers = [engine.add(prompt, max_new_tokens=new)[1] for prompt, new in asked]

    def now_and_then() -> None:
        if chance.random() < 0.4:
            engine.engine.forget_prefixes()

    engine.run(now_and_then)
    for (prompt, new), answer in zip(asked, answers, strict=True):
        assert answer.tokens == engine.expected(prompt, new)


def test_a_cache_whose_memory_was_given_back_serves_again() -> None:
    engine = Engine(tiny_model("llama"))
    prompt = [9] * 50
    expected = engine.expected(prompt, 6)
    for _ in range(3):
        assert engine.generate(prompt, max_new_tokens=6).tokens == expected
        engine.engine.forget_prefixes()
        engine.runner.cache.give_back()
        assert not any(area.any() for area in (*engine.runner.cache.keys, *engine.runner.cache.values))

"""Neither prefix reuse nor retraction, when the KV cache runs short, changes a token of any request."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rolling_batch_helpers import Engine, Received
from tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.slow

SMALL = {"kv_tokens": 180, "slots": 6, "conservativeness": 0.1}


def related_prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts, most of which begin like others."""
    chance = random.Random(seed)
    roots = [[chance.randrange(256) for _ in range(70)] for _ in range(3)]
    return [
        chance.choice(roots)[: chance.choice([0, 5, 33, 64, 70])]
        + [chance.randrange(256) for _ in range(chance.choice([1, 2, 9, 30]))]
        for _ in range(count)
    ]


def serve_all(engine: Engine, requests: list[tuple[list[int], dict[str, Any]]], seed: int) -> list[Received]:
    """Let the requests arrive while others run, cancel some, and return what the others received."""
    chance = random.Random(seed)
    pending = list(requests)
    answers: list[Received] = []
    cancelled: list[Received] = []

    def arrive_and_cancel() -> None:
        for _ in range(chance.choice([0, 1, 6])):
            if pending:
                prompt, parameters = pending.pop(0)
                answers.append(engine.add(prompt, **parameters)[1])
        if chance.random() < 0.02:
            number, answer = engine.add(related_prompts(1, seed)[0], max_new_tokens=20)
            cancelled.append(answer)
            engine.engine.step()
            engine.engine.abort(number)

    while pending:
        arrive_and_cancel()
        engine.run(arrive_and_cancel)
    assert all(answer.error is None for answer in (*answers, *cancelled))
    return answers


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_reuse_and_retraction_change_no_token(family: str) -> None:
    engine = Engine(tiny_model(family), **SMALL)
    chance = random.Random(5)
    requests = [(prompt, {"max_new_tokens": chance.choice([1, 9, 60, 70])}) for prompt in related_prompts(14, seed=2)]
    answers = serve_all(engine, requests, seed=1)
    for (prompt, parameters), answer in zip(requests, answers, strict=True):
        assert answer.tokens == engine.expected(prompt, parameters["max_new_tokens"])
    assert engine.engine.stats.retracted_requests > 0
    assert engine.engine.stats.cached_prompt_tokens > 100
    assert not engine.scheduler.slots._running


def test_sampling_penalties_and_stops_continue_after_a_retraction() -> None:
    chance = random.Random(1)
    requests = []
    for index, prompt in enumerate(related_prompts(10, seed=3)):
        parameters = {
            "max_new_tokens": 70,
            "do_sample": True,
            "temperature": 1.2,
            "seed": index,
            "repetition_penalty": chance.choice([1.0, 1.2]),
            "frequency_penalty": chance.choice([0.0, 0.3]),
            "stop": ("ab", "\x00\x01"),
        }
        requests.append((prompt, parameters))
    model = tiny_model("llama")
    roomy = Engine(model, slots=1)
    alone = [roomy.generate(prompt, **parameters) for prompt, parameters in requests]
    short = Engine(tiny_model("llama"), **SMALL)
    answers = serve_all(short, requests, seed=4)
    assert short.engine.stats.retracted_requests > 0
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert [answer.finish_reason for answer in answers] == [answer.finish_reason for answer in alone]


def test_a_retracted_prompt_is_scored_once() -> None:
    engine = Engine(tiny_model("llama"), **SMALL)
    prompts = related_prompts(8, seed=6)
    answers = [engine.add(prompt, max_new_tokens=60, prompt_logprobs=0, logprobs=0)[1] for prompt in prompts]
    engine.run()
    assert engine.engine.stats.retracted_requests > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        scored = answer.deltas[0].prompt_tokens
        assert scored is not None
        assert [token.id for token in scored] == prompt
        with torch.inference_mode():
            logits = engine.reference(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
        for row, token in enumerate([*scored[1:], *(token for delta in answer.deltas for token in delta.tokens)]):
            assert token.logprob == pytest.approx(float(logits[row, token.id]), abs=1e-4)


def test_usage_reports_how_much_of_the_prompt_was_reused() -> None:
    engine = Engine(tiny_model("llama"))
    prompt = related_prompts(1, seed=1)[0] * 2
    first = engine.generate(prompt, max_new_tokens=4)
    again = engine.generate([*prompt, *first.tokens, 7], max_new_tokens=4)
    scored = engine.generate(prompt, max_new_tokens=4, prompt_logprobs=0)
    usages = [answer.deltas[-1].usage for answer in (first, again, scored)]
    assert [usage.cached_tokens for usage in usages if usage] == [0, len(prompt) + 3, 0]
    assert scored.tokens == first.tokens


@pytest.mark.parametrize("family", ["llama", "mistral_with_window", "gemma2_with_soft_caps"])
def test_requests_that_find_the_same_prompt_in_one_step_answer_as_each_alone(family: str) -> None:
    """They read the prefix in place, and it is copied later, even for requests that end with their first token."""
    engine = Engine(tiny_model(family))
    prompt = related_prompts(1, seed=4)[0] * 2
    engine.generate(prompt, max_new_tokens=2)
    tails: list[list[int]] = [[1, 2, 3], [4], [], list(range(40)), [1, 2, 3, 5]]
    for tokens in (1, 6):
        asked = [prompt + tail for tail in tails]
        answers = [engine.add(entry, max_new_tokens=tokens)[1] for entry in asked]
        engine.run()
        for entry, answer in zip(asked, answers, strict=True):
            assert answer.tokens == engine.expected(entry, tokens)
        tails = [[*tail, 9, 8] for tail in tails]
    assert engine.engine.stats.cached_prompt_tokens > 9 * len(prompt)


def test_what_a_failed_step_left_behind_is_not_reused() -> None:
    engine = Engine(tiny_model("llama"))
    prompt = related_prompts(1, seed=1)[0] * 2
    engine.add(prompt, max_new_tokens=9)
    engine.engine.step()
    slot = engine.scheduler.running[0].slot
    engine.engine._runner.cache.keys[0][slot] = float("nan")
    engine.engine.fail_running(RuntimeError("out of luck"))
    assert engine.generate(prompt, max_new_tokens=9).tokens == engine.expected(prompt, 9)

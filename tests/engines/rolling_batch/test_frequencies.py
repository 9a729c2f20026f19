"""Rotary embeddings that change with the length: each text has those of its own, on both sides of the border."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rolling_batch_helpers import EOS, Engine, generated
from tiny_models import VOCABULARY, byte_tokenizer, random_model
from transformers import LlamaConfig, Phi3Config, PhimoeConfig

from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits

pytestmark = pytest.mark.slow

BORDER, CONTEXT, TOKENS = 48, 192, 20
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 257,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0 + place for place in range(8)],
    "factor": 4.0,
}
_LONG = {"max_position_embeddings": CONTEXT, "original_max_position_embeddings": BORDER}


def config(kind: str) -> Any:
    if kind == "phi3":
        return Phi3Config(**_BASE, **_LONG, rope_parameters=_LONGROPE, sliding_window=None)
    if kind == "phimoe":
        moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
        mscales = {"short_mscale": 1.1, "long_mscale": 1.3}
        return PhimoeConfig(**_BASE, **_LONG, **moe, rope_parameters={**_LONGROPE, **mscales})
    if kind == "llama_longrope":
        return LlamaConfig(**_BASE, max_position_embeddings=CONTEXT, rope_parameters=_LONGROPE)
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return LlamaConfig(**_BASE, max_position_embeddings=BORDER, rope_parameters=rope)


class Long(Engine):
    """A rolling batch that serves longer texts than those up to the border."""

    def __init__(self, kind: str, kv_tokens: int) -> None:
        self.model, self._kind = random_model(config(kind)), kind
        self.runner = ModelRunner(self.model, CONTEXT)
        self.runner.change_frequencies(CONTEXT)
        self.runner.prepare(16, CONTEXT)
        self.scheduler = Scheduler(SchedulerLimits(8, kv_tokens, 16, 16, 16, conservativeness=0.05))
        self.scheduler.border = self.runner.border
        self.engine = RollingBatchEngine(self.runner, self.scheduler, byte_tokenizer(), frozenset({EOS}), CONTEXT)

    def expected(self, prompt: list[int], max_new_tokens: int, **parameters: Any) -> list[int]:
        """Return what a new model generates, because frequencies of one that has generated may stay.

        In the cache of Phi 3 transformers 5 leaves out the text before the token with which it crosses the border.
        """
        cached = not self._kind.startswith("phi")
        return generated(random_model(config(self._kind)), prompt, max_new_tokens, use_cache=cached)


@pytest.mark.parametrize("kind", ["phi3", "phimoe", "llama_longrope", "dynamic"])
def test_texts_on_both_sides_of_the_border_and_across_it_share_a_batch(kind: str) -> None:
    chance = random.Random(4)
    texts = [
        [chance.randrange(256) for _ in range(length)] for length in (3, 30, 40, BORDER - 1, BORDER, BORDER + 1, 90)
    ]
    texts += [texts[6][:60] + texts[0], texts[6][:44], texts[2] + texts[0]]
    batch = Long(kind, kv_tokens=420)
    expected = [batch.expected(text, TOKENS) for text in texts]
    for _ in range(2):
        answers = [batch.add(text, max_new_tokens=TOKENS)[1] for text in texts]
        batch.run()
        assert [answer.tokens for answer in answers] == expected
    assert batch.engine.stats.retracted_requests
    assert batch.engine.stats.cached_prompt_tokens


def test_a_text_has_the_same_tokens_after_longer_ones() -> None:
    batch = Long("dynamic", kv_tokens=8 * CONTEXT)
    short, long = list(range(20)), list(range(100, 180))
    expected = batch.expected(short, TOKENS)
    for text in (long, short, long, short):
        answer = batch.generate(text, max_new_tokens=TOKENS)
        assert text is long or answer.tokens == expected


def test_other_models_have_no_border() -> None:
    model = random_model(LlamaConfig(**_BASE, max_position_embeddings=CONTEXT))
    runner = ModelRunner(model, CONTEXT)
    runner.change_frequencies(CONTEXT)
    assert runner.border is None
    with torch.inference_mode():
        assert "forward" not in vars(model.model.rotary_emb)

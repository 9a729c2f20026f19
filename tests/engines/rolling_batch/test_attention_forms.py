"""Every form of attention gives the tokens of `generate`: among other requests, retracted, in chunks, with adapters."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter, with_adapter
from rolling_batch_helpers import Engine, Received, generated_like

from benchmarks.tiny_checkpoints import random_model, tiny_config
from handlers.checkpoints.transformers_loading import forced_eos_token_ids
from handlers.rolling_batch.lora.layers import LoraWeights

pytestmark = pytest.mark.slow

TOKENS = 20
ATTENTION = ["q_proj", "v_proj"]
FLAT = {  # the model's type and the layers that its adapter changes
    "gpt_oss": ["q_proj", "k_proj", "o_proj"],  # sinks, windows
    "granite_swa": ATTENTION,  # sinks
    "mimo_v2_flash": ATTENTION,
    "llama4_text": ATTENTION,  # chunks, temperatures by position
    "bart": ["q_proj", "fc1"],  # positions from the cache
    "roberta": ["query", "value", "lm_head.dense"],  # the head has two layers
    "pegasus": ["v_proj", "fc2"],
}
BY_SEQUENCE = {
    "bloom": ["query_key_value", "dense_h_to_4h"],  # a bias by distance
    "mpt": ["Wqkv"],
    "falcon": ["query_key_value"],
    "gptj": ["q_proj", "fc_in"],
    "gpt_neo": ["q_proj", "c_fc"],  # windows
    "codegen": ["qkv_proj"],
    "diffllama": ATTENTION,  # heads that are subtracted
    "deepseek_v32": ["q_b_proj", "wq_b"],  # an index
    "glm_moe_dsa": ["q_b_proj", "o_proj"],
    "xglm": ATTENTION,
    "trocr": ATTENTION,  # every sequence alone
}


class Forms:
    """A rolling batch over a tiny model, whose cache is too small for what it is asked, with an adapter."""

    def __init__(self, model_type: str, targets: list[str], directory: Path, dtype: torch.dtype) -> None:
        model = random_model(tiny_config(model_type)).to(dtype)
        saved = save_adapter(model, directory, target_modules=targets)
        self.adapted = with_adapter(model, saved)
        self.engine = Engine(model, slots=8, kv_tokens=300, conservativeness=0.05)
        self.engine.engine.force_ends(forced_eos_token_ids(model))
        self.weights = self.engine.engine.load_adapter(read_adapter(str(saved)))

    def reference(self, with_adapter: bool) -> Any:
        return self.adapted if with_adapter else self.engine.reference

    def ask(self, prompt: list[int], with_adapter: bool) -> Received:
        weights: LoraWeights | None = self.weights if with_adapter else None
        return self.engine.add(prompt, weights, max_new_tokens=TOKENS)[1]


def asked() -> list[tuple[list[int], bool]]:
    """Return eight prompts, some of which begin alike; every third one is asked with an adapter."""
    chance = random.Random(5)
    texts = [[chance.randrange(256) for _ in range(length)] for length in (1, 3, 45, 90, 20)]
    texts += [texts[3][:60] + texts[4], texts[2][:33] + texts[1], texts[3]]
    return [(text, index % 3 == 2) for index, text in enumerate(texts)]


@pytest.mark.parametrize("model_type", [*FLAT, *BY_SEQUENCE])
def test_mixed_requests_get_the_tokens_of_generate(model_type: str, tmp_path: Path) -> None:
    forms = Forms(model_type, (FLAT | BY_SEQUENCE)[model_type], tmp_path, torch.float32)
    for _ in range(2):
        answers = [forms.ask(prompt, adapter) for prompt, adapter in asked()]
        forms.engine.run()
        for (prompt, adapter), answer in zip(asked(), answers, strict=True):
            assert answer.tokens == generated_like(forms.reference(adapter), prompt, answer.tokens, TOKENS)
    stats = forms.engine.engine.stats
    assert stats.retracted_requests
    assert stats.cached_prompt_tokens


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama4_text", "bart", "bloom", "gptj", "deepseek_v32"])
def test_in_bfloat16_a_text_is_the_same_alone_and_among_others(model_type: str, tmp_path: Path) -> None:
    forms = Forms(model_type, (FLAT | BY_SEQUENCE)[model_type], tmp_path, torch.bfloat16)
    prompts = [prompt for prompt, _ in asked()[:5]]
    alone = [forms.engine.generate(prompt, max_new_tokens=TOKENS).tokens for prompt in prompts]
    answers = [forms.ask(prompt, with_adapter=False) for prompt in prompts]
    forms.engine.run()
    assert [answer.tokens for answer in answers] == alone

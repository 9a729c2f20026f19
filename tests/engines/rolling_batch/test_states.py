"""Models whose layers keep states get the tokens of `generate` for every request, whatever else is in its batch."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter, with_adapter
from rolling_batch_helpers import EOS, Engine, Received, generated, is_generated
from tiny_models import CONTEXT, VOCABULARY, byte_tokenizer

import handlers.huggingface.model
from benchmarks.tiny_checkpoints import random_model, tiny_config
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedModel, load_engine
from handlers.rolling_batch.runner.model_runner import ModelRunner
from lmi_server.contract.errors import ModelMemoryError

pytestmark = pytest.mark.slow

FAMILIES = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
    "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip
TOKENS = 10


def conversations(chance: random.Random, count: int) -> list[list[int]]:
    """Return prompts of many lengths, several of which begin with the same tokens."""
    system = [chance.randrange(256) for _ in range(40)]
    lengths = [1, 2, 3, 17, 33, 70]
    prompts = [[chance.randrange(256) for _ in range(chance.choice(lengths))] for _ in range(count)]
    return [system + prompt[:25] if index % 2 else prompt for index, prompt in enumerate(prompts)]


def expected(model: Any, prompt: list[int], found: list[int]) -> list[int]:
    """Return the tokens that transformers generates, which is quick if these were found."""
    if is_generated(model, prompt, found, TOKENS):
        return found
    if len(prompt) == 1 and any(hasattr(module, "rg_lru") for module in model.modules()):
        tokens = without_cache(model, prompt)
    else:
        tokens = generated(model, prompt, TOKENS)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def without_cache(model: Any, prompt: list[int]) -> list[int]:
    """Return the likeliest tokens. `generate` begins a prompt of one token in what RecurrentGemma kept of the last."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_rounds_of_conversations_in_a_cache_that_is_too_small(family: str) -> None:
    model = random_model(tiny_config(family))
    reference = copy.deepcopy(model)
    engine = Engine(model, reference=reference, slots=4, kv_tokens=128, chunk=20, conservativeness=0.05, state_rows=8)
    assert engine.runner.states is not None
    fill = [[seed, *range(61)] for seed in range(2)]  # their outputs do not fit
    first = fill + conversations(random.Random(2), 7)
    asked = [(prompt, engine.add(prompt, max_new_tokens=TOKENS)[1]) for prompt in first]
    engine.run()
    second = [[*prompt, *answer.tokens, 7, 9][:118] for prompt, answer in asked[:4]]
    asked += [(prompt, engine.add(prompt, max_new_tokens=TOKENS)[1]) for prompt in second]
    engine.run()
    for prompt, answer in asked:
        assert answer.tokens == expected(reference, prompt, answer.tokens)
    stats = engine.engine.stats
    assert stats.retracted_requests
    assert stats.cached_prompt_tokens


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("bamba", ["in_proj", "q_proj", "o_proj"]),
        ("qwen3_next", ["in_proj_qkvz", "out_proj", "k_proj"]),
        ("lfm2", ["in_proj", "out_proj", "q_proj"]),
        ("recurrent_gemma", ["linear_x", "linear_out", "q_proj"]),
        ("zaya", ["v_proj_delayed", "q_proj"]),
    ],
)
def test_adapters_of_mixers_apply_to_the_rows_of_their_own_requests(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    model = random_model(tiny_config(family))
    directory = save_adapter(model, tmp_path, target_modules=targets)
    adapted = with_adapter(model, directory)
    engine = Engine(model, slots=8, chunk=20)
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    asked = []
    for index, prompt in enumerate(conversations(random.Random(3), 9)):
        with_it = index % 3 != 0
        _, answer = engine.add(prompt, weights if with_it else None, max_new_tokens=TOKENS)
        asked.append((prompt, with_it, answer))
    engine.run()
    for prompt, with_it, answer in asked:
        assert answer.tokens == expected(adapted if with_it else engine.reference, prompt, answer.tokens)


def test_what_of_an_adapter_has_no_effect_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(tiny_config("jamba"))
    directory = save_adapter(model, tmp_path, target_modules=["q_proj", "dt_proj"])
    adapted = with_adapter(model, directory)
    engine = Engine(model, slots=2)
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    assert "no effect on 1 layers, model.layers.0.mamba.dt_proj among them" in caplog.text
    _, answer = engine.add([1, 2, 3], weights, max_new_tokens=TOKENS)
    engine.run()
    assert answer.tokens == expected(adapted, [1, 2, 3], answer.tokens)


@pytest.mark.parametrize("page", [0, 8])
def test_requests_that_come_and_go_at_random_get_their_own_tokens(page: int) -> None:
    """Aborts, failures of whole steps, prefixes of each other, and few rows for states, in many orders."""
    model = random_model(tiny_config("qwen3_next"))
    reference = copy.deepcopy(model)
    answers: dict[tuple[int, ...], list[int]] = {}
    for seed in range(6):
        chance = random.Random(seed)
        limits = {"slots": 3, "kv_tokens": 150, "chunk": chance.choice([5, 16]), "page": page}
        engine = Engine(copy.deepcopy(model), reference=reference, **limits)
        system = [chance.randrange(VOCABULARY - 3) for _ in range(30)]
        live: list[tuple[list[int], int, Received]] = []
        ended: list[tuple[list[int], Received]] = []
        for _ in range(40):
            if chance.random() < 0.5:
                prompt = system[: chance.randrange(1, 30)] + [
                    chance.randrange(4) for _ in range(chance.randrange(1, 9))
                ]
                live.append((prompt, *engine.add(prompt, max_new_tokens=TOKENS)))
            if live and chance.random() < 0.1:
                engine.engine.abort(live.pop(chance.randrange(len(live)))[1])
            if engine.engine.has_work:
                engine.engine.step()
            ended += [(prompt, answer) for prompt, _, answer in live if answer.finish_reason]
            live = [entry for entry in live if not entry[2].finish_reason]
        engine.run()
        for prompt, answer in [*ended, *((prompt, answer) for prompt, _, answer in live)]:
            key = tuple(prompt)
            if key not in answers:
                answers[key] = expected(reference, prompt, answer.tokens)
            assert answer.tokens == answers[key]


def test_a_request_after_a_failed_step_continues_from_nothing_of_it() -> None:
    engine = Engine(random_model(tiny_config("bamba")), chunk=16)
    prompt = list(range(60))
    _, failed = engine.add(prompt, max_new_tokens=TOKENS)
    for _ in range(2):
        engine.engine.step()
    engine.engine.fail_running(RuntimeError("the step failed"))
    assert failed.error is not None
    with torch.inference_mode():
        tokens = engine.generate(prompt, max_new_tokens=TOKENS).tokens
        assert tokens == expected(engine.reference, prompt, tokens)
    assert engine.engine.stats.cached_prompt_tokens == 0


# --- what goes beside it ---


def loaded(family: str) -> LoadedModel:
    model = random_model(tiny_config(family))
    return LoadedModel(model, byte_tokenizer(), CONTEXT, {})


def test_states_come_out_of_the_memory_of_the_kv_cache() -> None:
    size = 0.002
    options = HuggingFaceOptions(dtype="fp32", kv_cache_memory_gb=size, max_rolling_batch_size=4)
    engine = load_engine(lambda: loaded("qwen3_next"), options)
    runner = ModelRunner(random_model(tiny_config("qwen3_next")), CONTEXT)
    assert runner.states is not None
    held = engine.details["states"] * runner.states.bytes_per_sequence
    per_token = sum(layer.width for layer in runner.layers) * 4
    assert engine.details["states"] == 12  # four that run, and two snapshots for each
    assert size * 2**30 - per_token <= held + engine.kv_tokens * per_token <= size * 2**30


def test_states_that_do_not_fit_are_refused_by_the_keys_that_help() -> None:
    options = HuggingFaceOptions(dtype="fp32", kv_cache_memory_gb=0.0001, max_rolling_batch_size=8)
    with pytest.raises(ModelMemoryError, match=r"lower option\.max_rolling_batch_size"):
        load_engine(lambda: loaded("qwen3_next"), options)


def test_drafts_are_off_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options = HuggingFaceOptions(dtype="fp32", kv_cache_memory_gb=0.01, speculative_draft_model="[ngram]")
    load_engine(lambda: loaded("bamba"), options)
    assert "option.speculative_draft_model has no effect: the model's layers keep states" in caplog.text


def test_a_model_of_mixers_alone_needs_no_context_in_its_configuration() -> None:
    model = random_model(tiny_config("mamba"))
    engine = load_engine(
        lambda: LoadedModel(model, byte_tokenizer(), max_len(model), {}),
        HuggingFaceOptions(dtype="fp32", kv_cache_memory_gb=0.01, max_rolling_batch_size=2),
    )
    assert engine.max_model_len == 32_768


def max_len(model: Any) -> int:
    return handlers.huggingface.model._max_len(model, HuggingFaceOptions(dtype="fp32"))

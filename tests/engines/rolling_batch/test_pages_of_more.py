"""Images and states over pages, on the CPU with torch's operators: the tokens of transformers, recorded or not."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter, with_adapter
from image_helpers import Part, Reference, ServedImages, all_generated_like, noise
from relay_helpers import on_loop
from rolling_batch_helpers import Engine, generated_like
from tiny_image_models import save_image_model

from benchmarks.tiny_checkpoints import random_model, tiny_config
from handlers.huggingface.handler import HuggingFaceHandler
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.attention.decode_passes import DecodePasses, run_once
from handlers.rolling_batch.images.loading import LoadedImages
from handlers.rolling_batch.pages import mixed_passes
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.schedule.page_table import PageTable

pytestmark = pytest.mark.slow

PAGE, TOKENS = 8, 10
_CAT, _DOG, _TALL = noise(1), noise(2), noise(3, 30, 70)
_MIXED: list[list[Part]] = [
    ["what is ", _CAT, " here"],
    ["what is ", _DOG, " here"],
    ["no image at all"],
    ["what is ", _CAT, " beside ", _TALL, "?"],
    ["what is in no image"],
    ["twice ", _DOG, _DOG],
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record no passes of more rows than the longest prompt here has."""
    monkeypatch.setattr(mixed_passes, "MAX_ROWS", 256)


def record(runner: ModelRunner, rows: int) -> DecodePasses:
    """Let decoding run in passes of fixed shape. `run_once` records nothing: a pass reads its buffers anew."""
    runner.uncapturable = lambda: None  # type: ignore[method-assign]  # it would say that this is no GPU
    assert runner.capture(rows, lambda: run_once)
    assert runner._recorded is not None
    assert runner._recorded.passes is not None
    return runner._recorded.passes


def counted(passes: DecodePasses) -> list[int]:
    """Return a list to which the passes add how many rows each of them has."""
    rows: list[int] = []
    logits = passes.logits

    def count(token_ids: torch.Tensor, *more: Any) -> torch.Tensor:
        rows.append(len(token_ids))
        return logits(token_ids, *more)

    passes.logits = count  # type: ignore[method-assign]
    return rows


# Blocks in all layers, in those with a window, positions of three axes, none of these, and states beside images.
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen2_5_vl", "llava", "qwen3_5"])
@on_loop
async def test_answers_to_images_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In chunks that divide what may be divided, from shared pages, after retractions, and in recorded steps."""
    directory = save_image_model(family, tmp_path)
    reference = Reference(directory)

    served = await ServedImages.start(
        directory,
        page=PAGE,
        max_rolling_batch_size=4,
        kv_cache_memory_gb=400 * 512 / 2**30,
        schedule_conservativeness=0.01,
        chunked_prefill_size=7,
    )
    runner: Any = served.handler._loaded.engine._runner
    assert runner.page == PAGE
    rows = counted(record(runner, 4))
    for _ in range(2):
        answers = await asyncio.gather(*(served.ask(parts, max_new_tokens=30) for parts in _MIXED))
        assert [answer.tokens for answer in answers] == all_generated_like(reference, _MIXED, answers, 30)
    assert any(answer.cached > 0 for answer in answers)
    assert rows
    await served.handler.stop()


class OnePlace:
    """Stands for CUDA graphs: each computes its logits into the same tensor again."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        out = run()

        def replay() -> torch.Tensor:
            with torch.inference_mode():
                return out.copy_(run())

        return replay


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_5"])
def test_the_check_of_images_keeps_the_logits_of_recorded_passes(family: str, tmp_path: Path) -> None:
    directory = save_image_model(family, tmp_path)
    options = HuggingFaceOptions.model_validate({"dtype": "fp32"})
    loaded = replace(HuggingFaceHandler().load_model(str(directory), options), page=PAGE)
    runner = loaded.runner()
    runner.prepare(2, 256)
    runner.uncapturable = lambda: None  # type: ignore[method-assign]
    assert runner.capture(2, OnePlace)
    assert isinstance(loaded.images, LoadedImages)
    difference = loaded.images.check.difference(runner.run, 256, PAGE)
    assert difference is not None
    assert difference < 1e-3


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "lfm2", "zamba2", "jamba"])
def test_states_have_rows_beside_pages(family: str) -> None:
    """Prefixes of each other, snapshots, retractions, recorded steps: no token differs from transformers'."""
    model = random_model(tiny_config(family))
    reference = copy.deepcopy(model)
    limits = {"slots": 4, "kv_tokens": 128, "chunk": 20, "conservativeness": 0.05, "state_rows": 8}
    engine = Engine(model, reference=reference, page=PAGE, **limits)
    assert engine.runner.states is not None
    rows = counted(record(engine.runner, 4))
    chance = random.Random(2)
    system = [chance.randrange(256) for _ in range(40)]
    fill = [[seed, *range(61)] for seed in range(2)]  # their outputs do not fit
    own = [[chance.randrange(256) for _ in range(chance.choice([1, 2, 17, 33]))] for _ in range(6)]
    first = fill + [system + prompt[:25] if index % 2 else prompt for index, prompt in enumerate(own)]

    def check() -> None:
        table = engine.scheduler.slots
        assert isinstance(table, PageTable)
        assert table.states is not None
        table.check()
        table.states.check()

    asked = [(prompt, engine.add(prompt, max_new_tokens=TOKENS)[1]) for prompt in first]
    engine.run(check)
    second = [[*prompt, *answer.tokens, 7, 9][:118] for prompt, answer in asked[:4]]
    asked += [(prompt, engine.add(prompt, max_new_tokens=TOKENS)[1]) for prompt in second]
    engine.run(check)
    for prompt, answer in asked:
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, TOKENS), answer.error
    assert engine.engine.stats.retracted_requests
    assert engine.engine.stats.cached_prompt_tokens
    assert rows


def test_steps_with_adapters_of_mixers_run_eagerly(tmp_path: Path) -> None:
    """Beside recorded ones: a mixer calls its linear layers for some of the rows at a time."""
    model = random_model(tiny_config("lfm2"))
    directory = save_adapter(model, tmp_path, target_modules=["in_proj", "out_proj", "q_proj"])
    adapted = with_adapter(model, directory)
    engine = Engine(model, slots=4, chunk=20, page=PAGE)
    rows = counted(record(engine.runner, 4))
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    prompts = [[5, 6, 7, number] for number in range(4)]
    asked = [engine.add(prompt, weights if prompt[-1] % 2 else None, max_new_tokens=TOKENS)[1] for prompt in prompts]
    engine.run()
    assert not rows
    for prompt, answer in zip(prompts, asked, strict=True):
        reference = adapted if prompt[-1] % 2 else engine.reference
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, TOKENS), answer.error
    assert engine.generate([1, 2], max_new_tokens=TOKENS).tokens == engine.expected([1, 2], TOKENS)
    assert rows


def test_layers_that_only_keep_states_have_no_pages() -> None:
    runner = ModelRunner(random_model(tiny_config("mamba2")), 64, page=PAGE)
    assert runner.page == 0
    assert runner.uncapturable() == "its layers keep states, and none of them attends"

"""Models with images or with states on a real GPU: over pages, eager and recorded, the tokens are transformers' own.

Skipped on a machine without a GPU by NVIDIA. docs/hardware.md says on which ones it has run.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from image_helpers import Part, Reference, ServedImages, noise
from relay_helpers import on_loop
from rolling_batch_helpers import Engine, generated, prompts
from tiny_image_models import save_image_model

from benchmarks.tiny_checkpoints import random_model, tiny_config
from handlers.rolling_batch.attention.decode_passes import CudaCapture

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

ROWS, TOKENS = 6, 12
_CAT, _TALL = noise(1), noise(3, 30, 70)
_MIXED: list[list[Part]] = [
    ["what is ", _CAT, " here"],
    ["no image at all"],
    ["what is ", _CAT, " beside ", _TALL, "?"],
    ["what is in no image"],
]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Keep products in float32 as they are: rounded to TF32 they would choose other tokens now and then."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "llava", "qwen3_5"])
@on_loop
async def test_answers_to_images_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    directory = save_image_model(family, tmp_path)
    reference = Reference(directory)
    expected = [reference.generate(parts, TOKENS) for parts in _MIXED]

    served = await ServedImages.start(
        directory, max_rolling_batch_size=4, kv_cache_memory_gb=0.01, chunked_prefill_size=24
    )
    details = served.handler._loaded.details
    assert details["kv_cache_page"]
    assert details["cuda_graphs"] == 3  # 1, 2 and 4 rows
    for _ in range(2):
        answers = await asyncio.gather(*(served.ask(parts, max_new_tokens=TOKENS) for parts in _MIXED))
        assert [answer.tokens for answer in answers] == expected
    assert any(answer.cached > 0 for answer in answers)
    await served.handler.stop()


RECORDED = ("bamba", "falcon_h1", "lfm2", "olmo_hybrid", "qwen3_5_text", "zamba2")
STATES = (*RECORDED, "jamba", "nemotron_h", "qwen3_next")  # with experts as well, which CUDA cannot record


def check(engine: Engine) -> None:
    asked = [(prompt, engine.add(prompt, max_new_tokens=TOKENS)[1]) for prompt in prompts(ROWS)]
    engine.run()
    for prompt, answer in asked:
        assert answer.tokens == generated(engine.reference, prompt, TOKENS), answer.error


@pytest.mark.parametrize("family", STATES)
def test_states_beside_pages_give_the_tokens_of_the_cpu(family: str) -> None:
    reference = random_model(tiny_config(family))
    engine = Engine(copy.deepcopy(reference).to("cuda"), slots=ROWS, reference=reference)
    assert engine.runner.page
    assert engine.runner.states is not None
    check(engine)


@pytest.mark.parametrize("family", RECORDED)
def test_recorded_steps_with_states_give_the_tokens_of_the_cpu(family: str) -> None:
    reference = random_model(tiny_config(family))
    engine = Engine(copy.deepcopy(reference).to("cuda"), slots=ROWS, reference=reference)
    recorded: Any = engine.runner.capture(ROWS, CudaCapture)
    assert recorded == 4  # 1, 2, 4 and 6 rows
    check(engine)

"""The rolling batch on a real GPU, eager and as CUDA graphs: in float32 the tokens of each family are those of the CPU.

Skipped on a machine without a GPU by NVIDIA. docs/hardware.md says on which ones it has run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter, with_adapter
from rolling_batch_helpers import Engine, generated, prompts
from tiny_models import FAMILIES, random_model, tiny_model

from handlers.rolling_batch.attention.decode_passes import CudaCapture

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

ROWS, TOKENS = 6, 12


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Keep products in float32 as they are: rounded to TF32 they would choose other tokens now and then."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(reference: Any) -> Engine:
    return Engine(copy.deepcopy(reference).to("cuda"), slots=ROWS, reference=reference)


def check(engine: Engine) -> None:
    answers = [(prompt, engine.add(prompt, max_new_tokens=TOKENS)[1]) for prompt in prompts(ROWS)]
    engine.run()
    for prompt, answer in answers:
        assert answer.tokens == engine.expected(prompt, TOKENS), answer.error


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_steps_give_the_tokens_of_the_cpu(family: str) -> None:
    check(on_gpu(tiny_model(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_give_the_tokens_of_the_cpu(family: str) -> None:
    engine = on_gpu(tiny_model(family))
    assert engine.runner.capture(ROWS, CudaCapture) == 4  # 1, 2, 4 and 6 rows
    check(engine)


# Products in float32 are to stay exact here, and inductor warns of that.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_steps_give_the_tokens_of_the_cpu() -> None:
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 1
    engine = on_gpu(random_model(config))
    assert engine.runner.compile(ROWS)
    assert engine.runner.capture(ROWS, CudaCapture) == 4
    check(engine)


def test_a_failed_recording_leaves_a_model_that_generates(caplog: pytest.LogCaptureFixture) -> None:
    """A layer that waits for the GPU cannot be recorded, as those of some mixtures of experts."""
    engine = on_gpu(tiny_model("llama"))
    hook = engine.model.model.norm.register_forward_hook(lambda module, inputs, output: output.sum().item() and None)
    assert engine.runner.capture(ROWS, CudaCapture) == 0
    assert "option.enable_cuda_graph has no effect, decoding runs eagerly: " in caplog.text
    check(engine)
    hook.remove()
    assert engine.runner.capture(ROWS, CudaCapture) == 4
    check(engine)


def test_adapters_share_steps_with_requests_that_have_none(tmp_path: Path) -> None:
    engine = on_gpu(tiny_model("llama"))
    assert engine.runner.capture(ROWS, CudaCapture)
    directory = save_adapter(engine.reference, tmp_path / "adapter", 1)
    adapter = engine.engine.load_adapter(read_adapter(str(directory)))
    asked = [(None, engine.reference), (adapter, with_adapter(engine.reference, directory))]
    answers = [(engine.add([5, 6, 7], adapter=weights, max_new_tokens=TOKENS)[1], model) for weights, model in asked]
    engine.run()
    for answer, model in answers:
        assert answer.tokens == generated(model, [5, 6, 7], TOKENS), answer.error


def test_a_seed_draws_the_same_tokens_in_any_batch() -> None:
    engine = on_gpu(tiny_model("llama"))
    drawn = {"max_new_tokens": TOKENS, "do_sample": True, "seed": 7, "temperature": 0.8, "top_p": 0.9}
    alone = engine.generate([5, 6, 7], **drawn).tokens
    _, answer = engine.add([5, 6, 7], **drawn)
    sampled = {"max_new_tokens": TOKENS, "do_sample": True}
    others = [engine.add(prompt, seed=seed, **sampled)[1] for seed, prompt in enumerate(prompts(4))]
    engine.run()
    assert answer.tokens == alone
    assert all(other.finish_reason for other in others)

"""option.quantize=dynamic_int8 and smoothquant of the deepspeed handler on a real GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from rolling_batch_helpers import Engine, prompts
from tiny_models import byte_tokenizer, llama_of_whole_blocks

from handlers.deepspeed.int8 import DynamicInt8Linear, quantize
from handlers.deepspeed.options import DeepSpeedOptions

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)


@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_a_layer_computes_what_it_does_on_the_cpu(rows: int) -> None:
    layer = DynamicInt8Linear.quantize(torch.nn.Linear(100, 60), None)
    given = torch.randn((1, rows, 100), generator=torch.Generator().manual_seed(rows))
    expected = layer(given)
    torch.testing.assert_close(layer.to("cuda")(given.to("cuda")).cpu(), expected)


@pytest.mark.parametrize("method", ["dynamic_int8", "smoothquant"])
def test_a_quantised_model_generates_what_it_does_on_the_cpu(method: str) -> None:
    model = llama_of_whole_blocks()
    quantize(model, byte_tokenizer(), DeepSpeedOptions(quantize=method))
    engine = Engine(copy.deepcopy(model).to("cuda"), reference=model)
    answers = [(prompt, engine.add(prompt, max_new_tokens=12)[1]) for prompt in prompts(4)]
    engine.run()
    for prompt, answer in answers:
        assert answer.tokens == engine.expected(prompt, 12), answer.error

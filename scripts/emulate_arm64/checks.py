"""What runs under the emulation: `python checks.py kernels`, `blocks` and `answers`.

`kernels` compares compiled kernels with numpy, and `blocks` what multiplies weights of 8 and 4 bits. `answers` compares
the tokens of a tiny random model under the rolling batch with those of transformers. Under the emulator the first two
take minutes, the third a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import tempfile
import time

import numpy as np

SEED = 7


def main() -> None:
    """Run the checks that are named, and say how long each took."""
    # A program for Arm starts no other of its kind here; the script that starts the emulator does.
    sys.executable = os.environ.get("EMULATED_PYTHON", sys.executable)
    print(f"{platform.machine()}, Python {platform.python_version()}", flush=True)
    for name in sys.argv[1:] or CHECKS:
        began = time.perf_counter()
        CHECKS[name]()
        print(f"{name}: the results agree ({time.perf_counter() - began:.0f} s)", flush=True)


def check_kernels() -> None:
    """Compile kernels over rows for this processor, and compare what they compute with numpy."""
    from handlers.cpu_kernels import rows

    random = np.random.default_rng(SEED)
    values = random.standard_normal((5, 48), np.float32)
    weight = random.standard_normal(48, np.float32)
    out = np.empty_like(values)
    rows.rms_norm(values, weight, 1e-5, out)
    scale = np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, values / scale * weight, rtol=1e-5)
    print("rms_norm", flush=True)
    best = np.empty(5, np.int64)
    rows.argmax_rows(values, best)
    np.testing.assert_array_equal(best, values.argmax(axis=1))
    print("argmax_rows", flush=True)
    sums = np.empty(5, np.float32)
    rows.log_sum_exp_rows(values, sums)
    np.testing.assert_allclose(sums, np.log(np.exp(values).sum(axis=1)), rtol=1e-5)
    print("log_sum_exp_rows", flush=True)
    gated = np.empty((5, 24), np.float32)
    rows.silu_and_mul(values, gated)
    gate, up = values[:, :24], values[:, 24:]
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-6)
    print("silu_and_mul", flush=True)


def check_blocks() -> None:
    """Multiply a row by weights of few bits, with the instructions for bytes, and compare it with numpy."""
    import torch
    from numba import njit

    from handlers.checkpoints.blocks.layout import lay_out
    from handlers.checkpoints.blocks.rounding import quantize
    from handlers.cpu_kernels.blocks import integers
    from handlers.cpu_kernels.blocks.layout import FIRST_PANEL, INPUTS, OUTPUTS
    from handlers.cpu_kernels.blocks.products import address_of, multiply_row
    from handlers.cpu_kernels.byte_products import CHOSEN

    @njit
    def product(weight, inputs, prepared, sums):
        for block in range(len(prepared)):
            integers.prepare(address_of(inputs) + np.uintp(2 * INPUTS * block), address_of(prepared[block]))
        panel = address_of(weight) + np.uintp(weight[FIRST_PANEL + 1])
        target, like = address_of(sums), inputs[0]
        multiply_row(weight[FIRST_PANEL], panel, len(prepared), address_of(prepared), target, like)

    torch.manual_seed(SEED)
    row = torch.randn(512).bfloat16()
    for name in ("q8_0", "q4_0", "q4_1", "q4_k"):
        stored = quantize(torch.randn((OUTPUTS, len(row))), name)
        prepared = np.zeros((len(row) // INPUTS, integers.PREPARED_BYTES), np.uint8)
        sums = np.empty(OUTPUTS, np.float32)
        product(lay_out(stored), row.view(torch.int16).numpy().view(np.uint16), prepared, sums)
        weight = stored.numbers().weight().double()
        size = (weight.abs() @ row.double().abs()).numpy()
        np.testing.assert_array_less(np.abs(sums - (weight @ row.double()).numpy()), 1e-5 * size)
        print(f"{name}, {CHOSEN}", flush=True)
    [assembly] = product.inspect_asm().values()
    of_processors = {"i8mm": ("usdot", "udot", "sdot"), "dotprod": ("udot", "sdot"), "vnni": ("vpdpbusd", "vpdpwssd")}
    wanted = of_processors[CHOSEN]
    assert all(f"{instruction}\t" in assembly for instruction in wanted), f"{wanted} are not what was compiled"


def check_answers() -> None:
    """Generate greedily with the handler, and with transformers' own `generate`."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from handlers.huggingface.handler import HuggingFaceHandler
    from handlers.huggingface.options import HuggingFaceOptions
    from lmi_server.contract.generation import GenerationRequest, SamplingParameters

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    words = {f"w{number}": number for number in range(64)}
    prompt = (3, 1, 4, 1, 5)

    async def generated(directory: str) -> list[int]:
        handler = HuggingFaceHandler()
        await handler.start(directory, HuggingFaceOptions(dtype="fp32", max_rolling_batch_size=2))
        sampling = SamplingParameters(max_new_tokens=8, ignore_eos=True)
        request = GenerationRequest(request_id="1", prompt=prompt, sampling=sampling)
        found = [token.id async for delta in handler.generate(request) for token in delta.tokens]
        await handler.stop()
        return found

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
        found = asyncio.run(generated(directory))
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found == expected[0, len(prompt) :].tolist(), (found, expected)


CHECKS = {"kernels": check_kernels, "blocks": check_blocks, "answers": check_answers}

if __name__ == "__main__":
    main()

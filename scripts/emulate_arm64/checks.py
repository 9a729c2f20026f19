"""What runs under the emulation: `python checks.py kernels` and `python checks.py answers`.

`kernels` compares compiled kernels with numpy. `answers` compares the tokens of a tiny random model under the rolling
batch with those of transformers. Under the emulator the first takes minutes, the second a quarter of an hour.
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


CHECKS = {"kernels": check_kernels, "answers": check_answers}

if __name__ == "__main__":
    main()

"""Compares weights of 8 and 4 bits with bfloat16 on this CPU: decoded tokens per second, and perplexity.

    python -m benchmarks.few_bits [--model DIR | --wide | --narrow] [--turns 7] [--kinds q8_0,q4_0,q5_k]

The demo model is loaded once for each value of option.quantize; with `+int8` behind it activations take 8 bits. The
engines run in this process and take turns, so that whatever else the machine does meets all of them; the table has the
median of the turns, and its ratio to bfloat16.
`--wide` takes a random model in the shape of Llama 3.2 1B, `--narrow` one with widths of 768 and 2048; their perplexity
says nothing. option.quantize makes no q5_k and q6_k, which are in files in GGUF: the layers of q4_k get random blocks,
about as wide as a model's weights. With blocks ten times as wide, rounding alone changes the answers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import in_turns, parser_of, show
from benchmarks.servers import MODEL
from handlers.checkpoints.blocks.formats import FORMATS, StoredWeight
from handlers.checkpoints.blocks.int8_activations import Int8BlockLinear
from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.blocks.layout import in_quads, lay_out
from handlers.checkpoints.quantization import rounds_activations
from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface import model as transformers_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedEngine, LoadedModel, load_engine
from handlers.rolling_batch.runner.load_check import LoadCheck
from lmi_server.contract.generation import SamplingParameters

INT8 = "+int8"
KINDS = ("q8_0", "q8_0+int8", "q4_0", "q4_0+int8", "q4_k", "q4_k+int8", "int8")
RANDOM_KINDS = ("q5_k", "q6_k")
REQUESTS = (1, 8, 32, 64)
TOKENS = 24
_WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_NARROW = _WIDE | {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
_RANDOM_SCALE = 2e-5
TEXT = (
    "The harbour froze in the second week of January, which nobody in the town could remember having seen"
    " before. At first the fishermen walked out on the ice to look at their boats, and their children "
    "followed with sledges. Then the bread ran out. The road over the pass had been closed since "
    "Christmas, and what the town ate came by sea. The mayor, who also kept the hardware shop, counted "
    "the flour in the bakery and the potatoes in the cellar of the school, and found that there was "
    "enough for nine days if everyone was sensible. He did not expect everyone to be sensible. On the "
    "fourth day a woman named Ingrid, who repaired engines, cut the front from an old tractor and bolted "
    "a plough of ship's steel in its place. It took her two days, and most of the morning of the third to"
    " start the engine. Then she drove it slowly up the road, with eleven men walking behind her with "
    "shovels, and the whole school behind them. They reached the top of the pass in the evening. On the "
    "other side stood a lorry full of bread, and its driver, who had been waiting there for a week "
    "because he had promised to, asked them what had taken so long."
)


def options_of(kind: str, **more: Any) -> HuggingFaceOptions:
    quantize, activations = kind.removesuffix(INT8), "int8" if kind.endswith(INT8) else "auto"
    weights = None if quantize == "bf16" else "q4_k" if quantize in RANDOM_KINDS else quantize
    return HuggingFaceOptions.model_validate(
        {"dtype": "bf16", "quantize": weights, "activation_dtype": activations, **more}
    )


def load(path: str, kind: str) -> LoadedEngine:
    options = options_of(kind, max_model_len=256, max_rolling_batch_size=max(REQUESTS))
    return load_engine(lambda: _load_model(path, kind.removesuffix(INT8), options), options)


def _load_model(path: str, name: str, options: HuggingFaceOptions) -> LoadedModel:
    loaded = transformers_model.load(path, options)
    for layer in loaded.model.modules() if name in RANDOM_KINDS else ():
        if isinstance(layer, BlockLinear) and layer.formats == ("q4_k",):
            laid = lay_out(_random_blocks(name, layer.out_features, layer.in_features))
            layer.lay(in_quads(laid)[None] if isinstance(layer, Int8BlockLinear) else laid)
            layer.limit_exact_rows(layer.unmeasured_rows)  # a new layout has that of few rows
            layer.formats = (name,)
    # The check that came with the model has the logits of the weights before they were replaced.
    check = LoadCheck(loaded.model, loaded.max_len, rounds_activations(loaded.model))
    return replace(loaded, check=check)


def _random_blocks(name: str, outputs: int, inputs: int) -> StoredWeight:
    kind, chance = FORMATS[name], torch.Generator().manual_seed(outputs * inputs)
    shape = outputs, inputs // kind.block_inputs
    raw = torch.randint(256, (*shape, kind.block_bytes), generator=chance, dtype=torch.uint8)
    for place in kind.scales:
        raw[:, :, place : place + 2] = (
            (torch.randn((*shape, 1), generator=chance) * _RANDOM_SCALE).half().view(torch.uint8)
        )
    return StoredWeight(kind, raw.flatten(1))


def tokens_per_second(loaded: LoadedEngine, requests: int) -> float:
    """Generate TOKENS tokens for each of some requests; the step that computes the prompts does not count."""
    for number in range(requests):
        sampling = SamplingParameters(max_new_tokens=TOKENS, ignore_eos=True)
        loaded.engine.add(f"{number}", [number + 3, 5, 7], sampling, "", 3, lambda _: None)
    loaded.engine.step()
    began, before = time.perf_counter(), loaded.engine.stats.generated_tokens
    while loaded.engine.has_work:
        loaded.engine.step()
    return (loaded.engine.stats.generated_tokens - before) / (time.perf_counter() - began)


def perplexity(path: str, kind: str) -> float:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = load_model(AutoModelForCausalLM, path, options_of(kind))
    for module in model.modules():
        if isinstance(module, Int8BlockLinear):
            module.limit_exact_rows(len(TEXT))  # the border is measured for engines alone
    ids = AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits.float()
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).exp())


def _perplexity_cell(path: str, kind: str) -> str:
    return "random" if kind.removesuffix(INT8) in RANDOM_KINDS else f"{perplexity(path, kind):.2f}"


def random_model(directory: str, shape: dict[str, Any]) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    with torch.device("cpu"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=49152, **shape), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def compare(path: str, turns: int, kinds: Sequence[str]) -> None:
    engines = {kind: load(path, kind) for kind in ("bf16", *kinds)}
    cells: dict[str, list[str]] = {kind: [kind] for kind in engines}
    for requests in REQUESTS:
        runs = {kind: partial(tokens_per_second, engine, requests) for kind, engine in engines.items()}
        found = {kind: statistics.median(rates) for kind, rates in in_turns(turns, runs, warm=False).items()}
        for kind, rate in found.items():
            cells[kind].append(f"{rate:.0f} tokens/s, {rate / found['bf16']:.2f} x")
    rows = [[*row, _perplexity_cell(path, kind)] for kind, row in cells.items()]
    show(("weights", *(f"{requests} requests" for requests in REQUESTS), "perplexity"), rows, width=140)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--wide", dest="shape", action="store_const", const=_WIDE)
    parser.add_argument("--narrow", dest="shape", action="store_const", const=_NARROW)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = random_model(directory, options.shape) if options.shape else str(options.model)
        compare(path, options.turns, options.kinds.split(","))


if __name__ == "__main__":
    main()

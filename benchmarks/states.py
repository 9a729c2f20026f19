"""Measures models whose layers keep states: tokens per second under the rolling batch, and in static batches.

    python -m benchmarks.states [--pairs 3] [--median 12] [--spread 1.3] [model_type ...]

Each model is tiny and random. Sixteen clients send one request after the other, with prompts and outputs of mixed
lengths; no two prompts begin alike. A static batch takes the next sixteen requests, and ends with the longest of them.
Models whose prompts cannot be padded run those of one length together there. What a static batch wastes grows with the
spread of the lengths of outputs: with long outputs of a spread of 0.3 both ways do nearly the same work.
Both ways serve in this process, in turns. The ratio is that of the processor time that they take, so that other
programs on the machine do not count.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from benchmarks.figures import in_turns, parser_of
from benchmarks.tiny_checkpoints import save
from benchmarks.zoo_serving import lmi_input
from lmi_server.configuration.handlers import load
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.generation import GenerationRequest, SamplingParameters

TYPES = ("qwen3_next", "falcon_h1", "bamba", "lfm2", "jamba", "mamba2")
CLIENTS, REQUESTS = 16, 128
PROMPTS = (5, 20, 40, 90)  # tokens; a letter is a token
# Of the lengths of outputs, which are spread like those of chats: a few are several times as long as most.
MEDIAN, SPREAD, MOST = 12, 1.3, 140
_BOTH = {"option.dtype": "fp32", "option.max_rolling_batch_size": str(CLIENTS)}
WAYS = {"scheduler": {"option.kv_cache_memory_gb": "0.5"}, "disable": {}}


class Outputs(NamedTuple):
    """The lengths of outputs: their median, and the spread of their logarithms."""

    median: int
    spread: float


def requests(turn: int, outputs: Outputs) -> list[tuple[str, int]]:
    """Return texts, and how many tokens to generate for each: the same lengths in every turn, and other letters."""
    chance = random.Random(1)
    letters = random.Random(turn)
    return [
        (
            "".join(letters.choices(string.ascii_letters, k=chance.choice(PROMPTS))),
            max(1, min(MOST, round(outputs.median * chance.lognormvariate(0, outputs.spread)))),
        )
        for _ in range(REQUESTS)
    ]


def rolling(handler: Any, model: Any, outputs: Outputs) -> Callable[[int], None]:
    loop, places = asyncio.new_event_loop(), asyncio.Semaphore(CLIENTS)
    loop.run_until_complete(handler.start(model.model_dir, model.options))

    async def one(number: int, text: str, tokens: int) -> None:
        sampling = SamplingParameters(max_new_tokens=tokens, ignore_eos=True)
        request = GenerationRequest(request_id=str(number), prompt=text, sampling=sampling)
        async with places:
            async for _ in handler.generate(request):
                pass

    async def every(turn: int) -> None:
        await asyncio.gather(*(one(number, *entry) for number, entry in enumerate(requests(turn, outputs))))

    return lambda turn: loop.run_until_complete(every(turn))


def static(handler: Any, model: Any, outputs: Outputs) -> Callable[[int], None]:
    handler.served_names = ("states",)
    handler.start(model.model_dir, model.options)

    def every(turn: int) -> None:
        inputs = [
            lmi_input(text, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            for text, tokens in requests(turn, outputs)
        ]
        for batch in (inputs[first : first + CLIENTS] for first in range(0, REQUESTS, CLIENTS)):
            for outcome in handler.handle(batch):
                if isinstance(outcome, BaseException):
                    raise outcome

    return every


def seconds(run: Callable[[int], None], turns: Iterator[int]) -> float:
    began, turn = time.process_time(), next(turns)
    run(turn)
    return time.process_time() - began


def measured(model_type: str, pairs: int, outputs: Outputs) -> tuple[float, float]:
    """Return tokens per second of processor time, under the rolling batch and in static batches."""
    tokens = sum(output for _, output in requests(0, outputs))
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent)
        save(model_type, directory)
        runs: dict[str, Callable[[], float]] = {}
        for way, more in WAYS.items():
            model = inspect_model(directory, {}, {**_BOTH, **more, "option.rolling_batch": way}).resolved()
            handler: Any = load(model.handler)()
            run = (rolling if way == "scheduler" else static)(handler, model, outputs)
            runs[way] = partial(seconds, run, itertools.count())
        one, other = (tokens / statistics.median(times) for times in in_turns(pairs, runs).values())
    return one, other


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model_types", nargs="*", default=TYPES, metavar="model_type")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each way")
    parser.add_argument("--median", type=int, default=MEDIAN, help="tokens of an output")
    parser.add_argument("--spread", type=float, default=SPREAD, help="of the logarithms of the lengths of outputs")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("model type | rolling batch, tokens/s | static batches, tokens/s | ratio")
    for model_type in arguments.model_types:
        one, other = measured(model_type, arguments.pairs, Outputs(arguments.median, arguments.spread))
        print(f"{model_type} | {one:.0f} | {other:.0f} | {one / other:.1f}", flush=True)


if __name__ == "__main__":
    main()

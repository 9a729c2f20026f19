"""What prompts that keep arriving cost the requests that decode, with steps with prompts recorded and eager.

    python -m scripts.gpu_check.mixed SHAPE DEVICE COUNT [--rows ROWS] [--adapters]

decodes for COUNT requests while a prompt arrives every few steps, and prints the figures as JSON. Both ways take turns
in one process. ROWS are those of the largest recorded step at most. With `--adapters` all requests take turns with four
LoRA adapters of rank 16 on all layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from handlers.rolling_batch.attention.decode_passes import CudaCapture, run_once
from handlers.rolling_batch.pages import mixed_passes
from handlers.rolling_batch.pages.choice import PAGE
from lmi_server.contract.generation import SamplingParameters
from scripts.gpu_check.contenders import add, load, random_adapter

EVERY = 4  # steps
TURNS = 3
_MIB = 2**20


class Arrivals:
    """An engine whose requests decode while prompts arrive. `recorded` is toggled by `use`."""

    def __init__(self, shape: str, device: str, count: int, adapters: bool) -> None:
        on_gpu = device == "cuda"
        self._loaded = (
            load(shape, device, count + 1) if on_gpu else load(shape, device, count + 1, page=PAGE, context=256)
        )
        self._on_gpu = on_gpu
        self._count = count
        runner: Any = self._loaded.engine._runner
        self._decoding: Any = runner._recorded
        if not on_gpu:
            self._decoding.capture(count + 1, lambda: run_once, runner._compute)
        self._mixed = self._decoding.mixed
        assert self._mixed is not None, "steps with prompts are not recorded"
        self._next = iter(range(10, 10**6))
        given = [self._loaded.engine.load_adapter(random_adapter(shape)) for _ in range(4 * adapters)]
        self._adapters: list[Any] = given or [None]

    @property
    def max_rows(self) -> int:
        """Return how many rows the largest recorded step has."""
        return int(self._mixed.max_rows)

    def use(self, recorded: bool) -> None:
        """Let steps with prompts run recorded, or eagerly."""
        self._decoding.mixed = self._mixed if recorded else None

    def record_again(self) -> dict[str, float]:
        """Return how long the recording takes, and how much memory; nothing if this time it pays for no step."""
        runner: Any = self._loaded.engine._runner
        if self._on_gpu:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() if self._on_gpu else 0
        began = time.perf_counter()
        capture = CudaCapture() if self._on_gpu else run_once
        self.use(recorded=False)  # what is measured of eager steps is not to run recorded
        kept = self._decoding._make_mixed(runner.cache, self._count + 1, capture, runner._compute)
        took = time.perf_counter() - began
        size = (torch.cuda.memory_reserved() if self._on_gpu else 0) - before
        return {} if kept is None else {"graphs": kept.shapes, "seconds": took, "mib": size / _MIB}

    def begin(self, steps: int) -> None:
        """Let the requests decode for so many steps."""
        add(self._loaded, self._count, steps, adapters=self._adapters)
        for _ in range(4):
            self._loaded.engine.step()

    def end(self) -> None:
        while self._loaded.engine.has_work:
            self._loaded.engine.step()

    def turn(self, steps: int, length: int) -> list[float]:
        """Return the seconds of each step, while a prompt of `length` tokens arrives every few of them."""
        seconds = []
        for step in range(steps):
            if step % EVERY == 0:
                self._arrive(length)
            began = time.perf_counter()
            self._loaded.engine.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def first_token(self, length: int) -> float:
        """Return the seconds to the first token of a prompt that comes alone."""
        self._arrive(length)
        began = time.perf_counter()
        self.end()
        return time.perf_counter() - began

    def _arrive(self, length: int) -> None:
        number = next(self._next)
        prompt = [number % 40_000, *range(100, 99 + length)]
        parameters = SamplingParameters(max_new_tokens=1, ignore_eos=True)
        self._loaded.engine.add(
            "check", prompt, parameters, "", 3, lambda delta: None, self._adapters[number % len(self._adapters)]
        )


def figures(arrivals: Arrivals, count: int, lengths: list[int], steps: int) -> list[dict[str, Any]]:
    """Return for each length of prompts, both ways: tokens per second of the decoding requests, and times of steps."""
    found = []
    for length in lengths:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        alone: dict[bool, list[float]] = {False: [], True: []}
        arrivals.begin(2 * (TURNS + 1) * steps + 20)
        for turn in range(TURNS + 1):  # the first one warms up
            for recorded in (False, True):
                arrivals.use(recorded)
                took = arrivals.turn(steps, length)
                seconds[recorded] += took if turn else []
        arrivals.end()
        for recorded in (False, True) * TURNS:
            arrivals.use(recorded)
            alone[recorded].append(arrivals.first_token(length))
        for recorded, took in seconds.items():
            found.append({
                "prompt": length, "recorded": recorded, "tokens_per_s": count * len(took) / sum(took),
                "median_ms": 1e3 * statistics.median(took),
                "longest_ms": 1e3 * statistics.median(max(took[at : at + steps]) for at in range(0, len(took), steps)),
                "first_token_ms": 1e3 * statistics.median(alone[recorded]),
            })  # fmt: skip
    return found


def measured(shape: str, device: str, count: int, rows: int, adapters: bool) -> dict[str, Any]:
    mixed_passes.MAX_ROWS = rows
    arrivals = Arrivals(shape, device, count, adapters)
    on_gpu = device == "cuda"
    lengths = [length for length in (20, 128, 384, 960, 1900) if length + count <= arrivals.max_rows] if on_gpu else [5]
    found = figures(arrivals, count, lengths, 60 if on_gpu else 4)
    return {
        "requests": count, "max_rows": arrivals.max_rows, "recording": arrivals.record_again(), "arrivals": found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("device")
    parser.add_argument("count", type=int)
    parser.add_argument("--rows", type=int, default=mixed_passes.MAX_ROWS)
    parser.add_argument("--adapters", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(measured(asked.shape, asked.device, asked.count, asked.rows, asked.adapters)))


if __name__ == "__main__":
    main()

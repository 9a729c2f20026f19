"""What penalties cost a step that decodes: with histories that stay on the device, and copied there in each step.

    python -m scripts.gpu_check.penalties SHAPE DEVICE COUNT LENGTH

decodes for COUNT requests with prompts of LENGTH tokens, and prints milliseconds of a step as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from handlers.rolling_batch.sampling.histories import DeviceHistories
from lmi_server.contract.generation import SamplingParameters
from scripts.gpu_check.contenders import load

STEPS = 40
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1}


def step_ms(engine: Any, count: int, length: int, copied: bool, **parameters: float) -> float:
    """Return the median of the milliseconds of a step."""
    for number in range(count):
        prompt = [10 + number, *(100 + place % 1000 for place in range(length - 1))]
        asked = SamplingParameters(max_new_tokens=STEPS + 12, ignore_eos=True, **parameters)
        engine.add("check", prompt, asked, "", 3, lambda delta: None)
    while engine._scheduler.waiting or not all(entry.decoding for entry in engine._scheduler.running):
        engine.step()
    seconds = []
    for _ in range(STEPS):
        if copied:
            engine._tokens._histories = DeviceHistories()
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    while engine.has_work:
        engine.step()
    return 1e3 * statistics.median(seconds)


def measured(shape: str, device: str, count: int, length: int) -> dict[str, Any]:
    engine: Any = load(shape, device, count).engine
    found: dict[str, list[float]] = {"without": [], "kept": [], "copied": []}
    for turn in range(4):  # the first one warms up
        for name, times in found.items():
            took = step_ms(engine, count, length, name == "copied", **({} if name == "without" else PENALTIES))
            times += [took] * (turn > 0)
    return {"requests": count, "prompt": length, "penalties_ms": {k: statistics.median(v) for k, v in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("device")
    parser.add_argument("count", type=int)
    parser.add_argument("length", type=int)
    asked = parser.parse_args()
    print(json.dumps(measured(asked.shape, asked.device, asked.count, asked.length)))


if __name__ == "__main__":
    main()

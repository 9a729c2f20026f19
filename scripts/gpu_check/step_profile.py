"""Where the time of a decode step goes: the GPU's work, and how long the GPU waits for the host.

    python -m scripts.gpu_check.step_profile SHAPE DEVICE COUNT

decodes for COUNT requests, and prints the figures of a step as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from scripts.gpu_check.contenders import add, load
from scripts.gpu_check.timeline import busy_and_gaps

STEPS = 20
TOP = 8


def step_figures(shape: str, device: str, count: int) -> dict[str, Any]:
    """Decode for `count` requests; return milliseconds of a step, and the kernels that take most of the GPU's time."""
    loaded = load(shape, device, count)
    add(loaded, count, 3 * STEPS + 8)
    for _ in range(STEPS):
        loaded.engine.step()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        loaded.engine.step()
        seconds.append(time.perf_counter() - began)
    figures: dict[str, Any] = {"requests": count, "step_ms": 1e3 * statistics.median(seconds)}
    if device != "cuda":
        return figures
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            loaded.engine.step()
        torch.cuda.synchronize()
    spans, kernels = [], defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            kernels[event.name] += event.time_range.elapsed_us()
    busy, gaps = busy_and_gaps(spans)
    most = sorted(kernels.items(), key=lambda kernel: -kernel[1])[:TOP]
    figures |= {
        "gpu_ms": busy / STEPS / 1e3,
        "waits_ms": sum(gaps) / STEPS / 1e3,
        "longest_wait_ms": max(gaps, default=0.0) / 1e3,
        "kernels": len(spans) / STEPS,
        "top": [(name[:90], round(took / STEPS / 1e3, 4)) for name, took in most],
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("device")
    parser.add_argument("count", type=int)
    asked = parser.parse_args()
    print(json.dumps(step_figures(asked.shape, asked.device, asked.count)))


if __name__ == "__main__":
    main()

"""The tables of `scripts.gpu_check`, as text; docs/hardware.md takes its figures from them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Results = Mapping[str, Mapping[str, Any]]


def tables(results: Results) -> str:
    """Return the figures of the sections that ran, and what failed, in Markdown."""
    parts = [
        _machine(),
        _rates(results),
        _steps(results),
        _arrivals(results),
        _penalties(results),
        "\n".join(f"{name}: {result['summary']}" for name, result in results.items() if "summary" in result),
        _failures(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _machine() -> str:
    import torch
    import transformers

    card = "no GPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        card = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    date = datetime.now(UTC).date().isoformat()
    return f"{date}, {card}, torch {torch.__version__}, transformers {transformers.__version__}"


def _rates(results: Results) -> str:
    rows = {name: result for name, result in results.items() if "rates" in result}
    counts = sorted({int(count) for result in rows.values() for count in result["rates"]})
    if not rows:
        return ""
    lines = ["| tokens/s, requests at once | " + " | ".join(map(str, counts)) + " | peak GiB |"]
    lines.append("|---" * (len(counts) + 2) + "|")
    for name, result in rows.items():
        rates = {int(count): rate for count, rate in result["rates"].items()}
        cells = [f"{rates[count]:,.0f}" if count in rates else "" for count in counts]
        peak = f"{result['peak_gib']:.1f}" if "peak_gib" in result else ""
        lines.append(f"| {name} | " + " | ".join([*cells, peak]) + " |")
        for count, rate in result.get("sampled", {}).items():
            lines.append(f"| {name}, sampled, {count} at once: {rate:,.0f} |")
        if "long" in result:
            lines.append(f"| {name}, one long prompt: {result['long']:,.0f} |")
    return "\n".join(lines)


def _steps(results: Results) -> str:
    parts = []
    for name, result in results.items():
        if "step_ms" not in result:
            continue
        line = f"{name}: {result['requests']} requests, {result['step_ms']:.2f} ms a step"
        if "gpu_ms" in result:
            line += (
                f"; the GPU works {result['gpu_ms']:.2f} ms in {result['kernels']:.0f} kernels and waits"
                f" {result['waits_ms']:.2f} ms, {result['longest_wait_ms']:.2f} ms at once at most"
            )
        parts += [line, *(f"  {milliseconds:8.3f} ms  {kernel}" for kernel, milliseconds in result.get("top", ()))]
    return "\n".join(parts)


def _arrivals(results: Results) -> str:
    lines = []
    for name, result in results.items():
        if "arrivals" not in result:
            continue
        own = result.get("recording")
        if own:
            lines.append(f"{name}: {own['graphs']} graphs in {own['seconds']:.1f} s and {own['mib']:.0f} MiB")
        lines.append(f"| {name}, {result['requests']} decode | tokens/s | a step | the longest | a prompt alone |")
        lines.append("|---" * 5 + "|")
        for way in result["arrivals"]:
            label = f"prompts of {way['prompt']}, {'recorded' if way['recorded'] else 'eager'}"
            times = (f"{way[key]:.2f} ms" for key in ("median_ms", "longest_ms", "first_token_ms"))
            lines.append(f"| {label} | {way['tokens_per_s']:,.0f} | " + " | ".join(times) + " |")
    return "\n".join(lines)


def _penalties(results: Results) -> str:
    return "\n".join(
        f"{name}: {result['requests']} requests with prompts of {result['prompt']} tokens, a step takes "
        + ", ".join(f"{took:.2f} ms {way}" for way, took in result["penalties_ms"].items())
        for name, result in results.items()
        if "penalties_ms" in result
    )


def _failures(results: Results) -> str:
    return "\n".join(
        f"{name} failed, {result['error']}\n{result.get('output', '')}"
        for name, result in results.items()
        if "error" in result
    )

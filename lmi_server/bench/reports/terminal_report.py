"""What a benchmark shows and writes: its figures as rows, a table on the terminal, JSON, and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lmi_server.bench.observation import Measured
from lmi_server.bench.records import LATENCIES, QUANTILES
from lmi_server.files.whole_files import replacing, write_text

_STATISTICS = ("mean", *QUANTILES)
_ERROR = "error: "
_MIB = 2**20
_SERVER = (
    ("server: prefix cache, % of prompt tokens", "cache_hit", 1, 100.0),
    ("server: time in queue, mean", "queue_ms", 1, 1.0),
    ("server: waiting requests, most", "waiting_max", 0, 1.0),
    ("server: running requests, most", "running_max", 0, 1.0),
    ("server: retractions", "retracted", 0, 1.0),
    ("server: KV cache before, %", "kv_usage_before", 1, 100.0),
    ("server: KV cache, most, %", "kv_usage_max", 1, 100.0),
    ("server: KV cache after, %", "kv_usage_after", 1, 100.0),
    ("server: processor cores", "cpu_cores", 2, 1.0),
    ("server: memory, most, MiB", "memory_bytes_max", 0, 1 / _MIB),
    ("GPU, % of the time", "gpu_load_mean", 1, 100.0),
    ("GPU memory, most, MiB", "gpu_memory_bytes_max", 0, 1 / _MIB),
)
_COUNTS = (
    ("completed", "completed", 0),
    ("requests/s", "requests_per_s", 2),
    ("goodput/s", "goodput_per_s", 2),
    ("output tokens/s", "output_tokens_per_s", 1),
    ("prompt tokens", "prompt_tokens", 0),
    ("cached tokens", "cached_tokens", 0),
)
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2el": "end to end",
}


def print_runs(console: Console, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one column for each run; keys are their titles, values what `Measured.figures` returns."""
    table = Table(title="latencies in milliseconds")
    table.add_column("")
    for title in runs:
        table.add_column(title, justify="right")
    for row in rows(runs):
        table.add_row(*row, style="red" if row[0].startswith(_ERROR) else None)
    console.print(table)


def rows(runs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each figure that a run has: its name, and its value in each run."""
    figures = [(title, [run.get(key) for run in runs.values()], digits) for title, key, digits in _COUNTS]
    figures += [
        (f"{TITLES[name]}, {statistic}", [run[f"{name}_ms"].get(statistic) for run in runs.values()], 1)
        for name in LATENCIES
        for statistic in _STATISTICS
    ]
    figures += [
        (
            title,
            [None if (value := run.get("server", {}).get(key)) is None else value * factor for run in runs.values()],
            digits,
        )
        for title, key, digits, factor in _SERVER
    ]
    found = [
        [title, *("" if value is None else f"{value:,.{digits}f}" for value in values)]
        for title, values, digits in figures
        if any(value is not None for value in values)
    ]
    errors = sorted({error for run in runs.values() for error in run["errors"]})
    return found + [
        [f"{_ERROR}{error}", *(str(run["errors"].get(error, "")) for run in runs.values())] for error in errors
    ]


def write_json(path: Path, settings: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the settings and the figures of each run."""
    write_text(path, json.dumps({"settings": settings, "runs": runs}, indent=2) + "\n")


def write_csv(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write one line for each run; a latency has a column for each statistic, such as `ttft_ms_p99`."""
    lines = [{"run": title, **_flat(run)} for title, run in runs.items()]
    columns = list(dict.fromkeys(column for line in lines for column in line))
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)


def write_records(path: Path, runs: Mapping[str, Measured]) -> None:
    """Write each request as a line of JSON, with times in seconds of the load generator's clock."""
    with replacing(path) as file:
        for title, run in runs.items():
            for record in run.records:
                file.write(json.dumps({"run": title, **asdict(record)}) + "\n")


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in run.items():
        if name == "errors":
            flat[name] = sum(value.values())
        elif isinstance(value, Mapping):
            flat |= {f"{name}_{statistic}": number for statistic, number in value.items()}
        else:
            flat[name] = value
    return flat

"""Prints an explanation as tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmi_server.configuration.declaration import written
from lmi_server.configuration.memory_estimate import gib
from lmi_server.explain.explanation import Explained, Explanation


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print `explanation` as tables: values that some layer sets, then defaults, then what follows from them."""
    heading = f"{explanation.name}: {explanation.model}, handler {explanation.handler}"
    console.print(Text(heading, style="bold"), soft_wrap=True)
    decided = [option for option in explanation.options if option.layer != "default"]
    defaults = [option for option in explanation.options if option.layer == "default"]
    console.print(_decided([*decided, *explanation.unknown], explanation.model_dir))
    console.print(_defaults(defaults))
    console.print(_pairs("Engine arguments", explanation.engine_arguments))
    console.print(_pairs("Memory of one worker, on each of its devices", _memory(explanation.memory)))
    _lines(console, "Worker command", [shlex.join(explanation.worker_command)])
    _lines(console, "MPI launcher", _launcher(explanation))
    variables = [f"{name}={value}" for name, value in explanation.worker_environment.items()]
    _lines(console, "Worker environment", variables)
    _lines(console, "Warnings", explanation.warnings, "yellow")
    _lines(console, "Not available in this version", explanation.unavailable, "red")
    _lines(console, "Files", explanation.files, "red")
    _lines(console, "Problems", explanation.problems, "red")


def _launcher(explanation: Explanation) -> Sequence[str]:
    """Return a line about mpirun; empty if the worker is one process, or if mpirun is not installed."""
    mpirun = explanation.machine["mpirun"]
    if "WORLD_SIZE" not in explanation.worker_environment or mpirun is None:
        return ()
    return [f"{mpirun['implementation']} {mpirun['version']}: {mpirun['path']}"]


def _decided(options: Iterable[Explained], model_dir: str) -> Table:
    table = _table("Decided", "Key", "Value", "From", "Meaning")
    for option in options:
        origin = (option.place or option.layer).removeprefix(f"{model_dir}/")
        if option.layer in ("engine alias", "deprecated key"):
            origin = f"{option.layer}, {origin}"
        meaning = f"{option.meaning} [{option.note}]" if option.note else option.meaning
        _add(table, option.key, written(option.value), origin, meaning)
    return table


def _defaults(options: Iterable[Explained]) -> Table:
    table = _table("Defaults", "Key", "Value", "Meaning")
    for option in options:
        _add(table, option.key, written(option.value), option.meaning)
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))  # rich would take [brackets] in a str for markup


def _pairs(title: str, pairs: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    for name, value in pairs.items():
        table.add_row(Text(name), Text(str(value)))
    return table


def _memory(memory: Mapping[str, Any]) -> Mapping[str, str]:
    per_token = memory["kv_bytes_per_token"]
    return {
        "devices": f"{memory['devices']} ({memory['device_kind']})",
        "weights": gib(memory["weights_bytes"]),
        **_quantised(memory["unquantized_bytes"]),
        "KV cache per token": "unknown" if per_token is None else f"{per_token} bytes",
        "KV cache of all running requests": f"{gib(memory['kv_bytes'])} for {memory['kv_tokens'] or '?'} tokens",
        **_reserved(memory["kv_reserved_bytes"]),
        "KV cache that fits": f"{'?' if memory['kv_tokens_that_fit'] is None else memory['kv_tokens_that_fit']} tokens",
        "free": gib(memory["available_bytes"]),
    }


def _quantised(unquantized: int | None) -> Mapping[str, str]:
    return {} if unquantized is None else {"weights without quantisation": gib(unquantized)}


def _reserved(size: int | None) -> Mapping[str, str]:
    return {} if size is None else {"KV cache that the worker reserves": gib(size)}


def _lines(console: Console, title: str, lines: Sequence[str], style: str = "") -> None:
    if not lines:
        return
    console.print(Text(title, style="italic"))
    for line in lines:
        console.print(Text(f"  {line}", style=style), soft_wrap=True)

"""What benchmarks share: runs in turns, runs in processes of their own, arguments, and tables."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the text of a module as it is."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def show(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, width: int = 120) -> None:
    """Print a table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def in_turns(count: int, runs: Mapping[str, Callable[[], T]], warm: bool = True) -> dict[str, list[T]]:
    """Run each `count` times, in turns, and return what they give.

    The order is reversed in every other turn, so that whatever else the machine does meets all of them. A turn before
    that, which does not count, warms up.
    """
    found: dict[str, list[T]] = {name: [] for name in runs}
    for turn in range(-warm, count):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            found[name].append(runs[name]())
    return {name: values[warm:] for name, values in found.items()}


def ratios(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios of pairs, and its quartiles: drift of the machine changes neither."""
    found = [first / second for first, second in zip(one, other, strict=True)]
    lower, _, upper = quantiles(found, n=4) if len(found) > 1 else (found[0],) * 3
    return median(found), lower, upper


def run_apart(module: str, *arguments: str, **variables: str) -> Any:
    """Run a module in its own process; return the JSON in the last line that it prints. Raises CalledProcessError."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    finished = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return json.loads(finished.stdout.decode().strip().rpartition("\n")[2])

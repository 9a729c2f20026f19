"""Measures what structured output costs the throughput of the rolling batch, with the demo model.

    python -m benchmarks.structured_output

One server has 32 requests at a time, each for 64 tokens: plain ones, or ones whose answers are held to a JSON schema
that no answer completes within 64 tokens. Turns alternate in pairs (plain, constrained; constrained, plain), so that
whatever else the machine does meets both. Prints the ratio of each pair, their median and their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.generation import MODEL, NEW_TOKENS, prompts, serving
from benchmarks.load import completion, in_turns, tokens_per_second

NAME = MODEL.name.replace("-", "_")
PLACES = 32
_CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "country": {"enum": ["France", "Italy", "Spain", "Portugal"]},
        "inhabitants": {"type": "integer", "minimum": 0},
    },
    "required": ["name", "country", "inhabitants"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": _CITY, "minItems": 50}
CONSTRAINED: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}}


def requests(**fields: Any) -> list[dict[str, Any]]:
    return [completion(NAME, prompt, NEW_TOKENS, stream=True, **fields) for prompt in prompts(PLACES)]


def measured(pairs: int) -> list[tuple[float, float]]:
    """Return tokens per second of each pair of turns, plain and constrained."""
    with serving(MODEL, PLACES) as (_, port):
        turns = (
            partial(tokens_per_second, port, turn, PLACES, NEW_TOKENS) for turn in (requests(), requests(**CONSTRAINED))
        )
        return in_turns(pairs, *turns)  # the first pair compiles the grammar and fills the prefix cache


def report(rates: list[tuple[float, float]]) -> None:
    table = Table("pair", "plain, tokens/s", "constrained, tokens/s", "ratio", title=f"{PLACES} requests at a time")
    ratios = [constrained / plain for plain, constrained in rates]
    for number, ((plain, constrained), ratio) in enumerate(zip(rates, ratios, strict=True), 1):
        table.add_row(str(number), f"{plain:,.0f}", f"{constrained:,.0f}", f"{ratio:.3f}")
    console = Console(width=120)
    console.print(table)
    low, median, high = statistics.quantiles(ratios, n=4)
    console.print(f"tokens/s, ratio: median {median:.3f}, quartiles {low:.3f} to {high:.3f}  at least 0.950")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured_output", description=__doc__)
    parser.add_argument("--pairs", type=int, default=16, help="pairs of turns, at least 2")
    report(measured(parser.parse_args().pairs))


if __name__ == "__main__":
    main()

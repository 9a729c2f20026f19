"""Measures what structured output costs the throughput of the rolling batch, with the demo model.

    python -m benchmarks.structured_output

One server has 32 requests at a time, each for 64 tokens: plain ones, or ones whose answers are held to a JSON schema
that no answer completes within 64 tokens. Turns alternate in pairs (plain, constrained; constrained, plain), so that
whatever else the machine does meets both. Prints the ratio of each pair, their median and their quartiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.figures import in_turns, parser_of, ratios, show
from benchmarks.generation import NEW_TOKENS, prompts
from benchmarks.load import completion, tokens_per_second
from benchmarks.servers import MODEL, NAME, serving

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


def measure(pairs: int) -> None:
    turns = {"plain": requests(), "constrained": requests(**CONSTRAINED)}
    with serving(MODEL, PLACES) as server:
        # The turn that warms up compiles the grammar and fills the prefix cache.
        rate = {name: partial(tokens_per_second, server.port, turn, PLACES, NEW_TOKENS) for name, turn in turns.items()}
        plain, constrained = in_turns(pairs, rate).values()
    rows = [
        (str(number), f"{one:,.0f}", f"{other:,.0f}", f"{other / one:.3f}")
        for number, (one, other) in enumerate(zip(plain, constrained, strict=True), 1)
    ]
    show(("pair", "plain, tokens/s", "constrained, tokens/s", "ratio"), rows, f"{PLACES} requests at a time")
    median, low, high = ratios(constrained, plain)
    print(f"tokens/s, ratio: median {median:.3f}, quartiles {low:.3f} to {high:.3f}  at least 0.950")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=16, help="pairs of turns, at least 2")
    measure(parser.parse_args().pairs)


if __name__ == "__main__":
    main()

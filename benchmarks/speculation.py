"""Measures what speculative decoding gains in tokens per second, with the demo model, at 1 and at 8 requests at a time.

    python -m benchmarks.speculation [--pairs 6] [--draft DIR]

Two servers run side by side, one without and one with `option.speculative_draft_model`, and take turns in pairs (plain,
drafting; drafting, plain), so that whatever else the machine does meets both. The tasks:

- repeat: a text to write again, whose words can be looked up in the prompt
- free: questions, whose answers are new

Each answer has 128 tokens. There is no smaller model with the demo model's tokens, so the rows of a draft model have
the demo model itself as one, unless --draft names another: it agrees with every token but is as slow, and the rows show
what an option that cannot pay costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.generation import MODEL, prompts, serving
from benchmarks.load import completion, in_turns, tokens_per_second

NAME = MODEL.name.replace("-", "_")
KEY = "OPTION_SPECULATIVE_DRAFT_MODEL"
NGRAM = "[ngram]"
TOKENS = 128
PLACES = 8
CONCURRENCIES = (1, PLACES)
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_TEXT = (
    "The river {} rises in the hills behind the old mill. It runs past the village, turns north at the stone bridge,"
    " and reaches the lake after nine miles. In spring its water is high, and the fields beside it are wet for weeks."
    " Boats carry bread, paper and steel from the town to the harbour, and come back with fish and salt."
)


def tasks(name: str) -> list[str]:
    if name == "free":
        return [_TURN.format(prompt) for prompt in prompts(PLACES)]
    texts = (_TEXT.format(river) for river in ("Ash", "Bourne", "Cole", "Dart", "Esk", "Frome", "Gade", "Humber"))
    return [_TURN.format(f"Repeat this text word by word: {text}") + text[:40] for text in texts]


def requests(name: str, count: int) -> list[dict[str, Any]]:
    asked = tasks(name)[:count]
    return [completion(NAME, task, TOKENS, stream=True, temperature=0, ignore_eos=True) for task in asked]


@contextmanager
def drafting(draft: str | None) -> Iterator[int]:
    """Serve the demo model; yield the port."""
    os.environ.pop(KEY, None)
    if draft is not None:
        os.environ[KEY] = draft
    try:
        with serving(MODEL, PLACES) as (_, port):
            yield port
    finally:
        os.environ.pop(KEY, None)


def measured(plain: int, other: int, turn: list[dict[str, Any]], pairs: int) -> list[tuple[float, float]]:
    """Return tokens per second of each pair of turns, of the server `plain` and of the one that drafts."""
    return in_turns(pairs, *(partial(tokens_per_second, port, turn, len(turn), TOKENS) for port in (plain, other)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of turns for each row, at least 2")
    parser.add_argument("--draft", default=str(MODEL), help="the draft model")
    arguments = parser.parse_args()
    shown = Table("drafts", "task", "requests", "plain, tokens/s", "drafting, tokens/s", "ratio")
    with drafting(None) as plain:
        for draft in (NGRAM, arguments.draft):
            with drafting(draft) as other:
                for task in ("repeat", "free"):
                    for count in CONCURRENCIES:
                        rates = measured(plain, other, requests(task, count), arguments.pairs)
                        means = [f"{statistics.median(rate):.0f}" for rate in zip(*rates, strict=True)]
                        ratio = statistics.median(drafted / alone for alone, drafted in rates)
                        name = "looked up" if draft == NGRAM else os.path.basename(draft)
                        shown.add_row(name, task, str(count), *means, f"{ratio:.2f}")
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()

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

import os
import statistics
from functools import partial
from typing import Any

from benchmarks.figures import in_turns, parser_of, ratios, show
from benchmarks.generation import prompts
from benchmarks.load import completion, tokens_per_second
from benchmarks.servers import MODEL, NAME, serving

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


def measured(ports: dict[str, int], turn: list[dict[str, Any]], pairs: int) -> tuple[str, ...]:
    """Return tokens per second of the servers without and with drafts, and the ratio of the second to the first."""
    rate = {name: partial(tokens_per_second, port, turn, len(turn), TOKENS) for name, port in ports.items()}
    plain, drafting = in_turns(pairs, rate).values()
    ratio, _, _ = ratios(drafting, plain)
    return f"{statistics.median(plain):.0f}", f"{statistics.median(drafting):.0f}", f"{ratio:.2f}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of turns for each row, at least 2")
    parser.add_argument("--draft", default=str(MODEL), help="the draft model")
    arguments = parser.parse_args()
    rows = []
    with serving(MODEL, PLACES) as plain:
        for draft in (NGRAM, arguments.draft):
            name = "looked up" if draft == NGRAM else os.path.basename(draft)
            with serving(MODEL, PLACES, **{KEY: draft}) as other:
                ports = {"plain": plain.port, "drafting": other.port}
                for task in ("repeat", "free"):
                    for count in CONCURRENCIES:
                        rows.append((name, task, str(count), *measured(ports, requests(task, count), arguments.pairs)))
    show(("drafts", "task", "requests", "plain, tokens/s", "drafting, tokens/s", "ratio"), rows)


if __name__ == "__main__":
    main()

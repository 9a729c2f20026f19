"""The table of `benchmarks.zoo`, and the page docs/models.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tiny_checkpoints import NOT_BUILT
from benchmarks.zoo_serving import EXACT, REFUSED, Outcome, Row

_INTRODUCTION = """# Models

Which models the rolling batch serves, and how exactly: look yours up in the table.

`option.rolling_batch=auto`, or no such key, serves every causal language model of transformers that the table lists as
exact. It uses the rolling batch of transformers (`scheduler`) if that gives the model's own tokens, otherwise
[vLLM](configuration.md) if it is installed and able, and otherwise static batches. A warning in the log, in
`lmi-server explain` and in `lmi-server check` says so. `option.rolling_batch=scheduler`, `vllm` or `disable` asks for
one way by name.

`python -m benchmarks.zoo --page docs/models.md` writes this page. It builds a tiny random model of each type, serves it
on the CPU in float32 with several prompts at once, longer than every window and chunk of the model, and compares tokens
and log probabilities with greedy `generate` of transformers for each prompt alone. `exact` means that all are the same.
What the scheduler serves is served twice more. `busy`: eight requests at a time, twice, in chunks of 16 tokens, with a
KV cache too small for all of them, so that some are retracted, from prefixes of each other, and every third one with a
LoRA adapter if the model has linear layers that the benchmark knows. `bf16`: in bfloat16 each text alone and all in one
batch, greedy and with a seed. `same` means that no token differs, `ties` that answers part only where two tokens lie
within the model's rounding: between both runs the distance of their logits changes by at most one unit in the last
place of each, or by no more than it does if every module with parameters rounds its results to neighbouring numbers.
An empty cell was not run.
A model of images or audio is asked with text alone; [requests.md](requests.md#images-in-prompts) says which models read
images. Pipelines of diffusers, which make images, are on a [page of their own](images.md).

A model that the rolling batch refuses only when it loads is loaded again for static batches, and the log says why.

Rotary embeddings that change with the length of a text (longrope of Phi 3, dynamic NTK) are those of each text's own
length under the rolling batch, on both sides of the border and across it. Keys of Phi 3 and its relatives are computed
anew where a text crosses the border, as `generate(use_cache=False)` has it: with a cache, `generate` of transformers 5
leaves out there what comes before. Keys of other models stay as they are, as in `generate`. Split over ranks, such a
model is served up to the border: `option.max_model_len`.

Models whose layers keep states beside keys and values, or in their place, run under the rolling batch on one device
([rolling-batch.md](rolling-batch.md#states)). A model whose config.json names no context (Mamba, RecurrentGemma, xLSTM)
gets 32,768 tokens, unless `option.max_model_len` says otherwise. Without states (some Bloom) it gets 2048, and the log
says so.

The rolling batch does not know the form of gpt-oss's answers (harmony): their text has the reasoning before the answer,
and calls of tools stay text.

Any other model of images or sounds that is no causal language model is served with vLLM, if it is installed and knows
the architecture. Most of vLLM's models of images need the package torchvision, too.
"""


def read(file: Path) -> list[Row]:
    """Return the rows in `file`, by model type."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return sorted(map(_row, lines), key=lambda row: row.model_type)


def _row(line: str) -> Row:
    found = json.loads(line)
    for way in ("auto", "scheduler", "vllm", "mixed", "alike"):
        found[way] = None if found.get(way) is None else Outcome(**found[way])
    return Row(**found)


def summary(rows: Sequence[Row]) -> str:
    """Return how many models were served exactly, and by which way."""
    results, ways = Counter(row.auto.result for row in rows), Counter(row.auto.way for row in rows)
    return f"{len(rows)} model types: {_counts(results)}. Served by: {_counts(ways)}."


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def page(rows: Sequence[Row]) -> str:
    """Return the page in Markdown."""
    lines = [_INTRODUCTION, summary(rows), ""]
    lines.append("| model type | architecture | auto | result | busy | bf16 | why not the scheduler |")
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (row.model_type, row.architecture, row.auto.way, row.auto.result, *_busy_cells(row), _reason(row))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "The table leaves out:", ""]
    lines += [f"- {name}: {reason}" for name, reason in sorted(NOT_BUILT.items())]
    return "\n".join(lines) + "\n"


def _busy_cells(row: Row) -> tuple[str, str]:
    """Return what came of a model among others, and in bfloat16."""
    busy = "" if row.mixed is None else row.mixed.result
    without = row.mixed is not None and "no adapter" in row.mixed.message
    alike = "" if row.alike is None else row.alike.result.replace(EXACT, "same")
    return busy + (", no adapter" if without else ""), alike


def _reason(row: Row) -> str:
    """Return why the scheduler refuses the model, in short, or the remedy if nothing serves it; "" if it serves it."""
    if row.scheduler.result == EXACT:
        return ""
    if row.auto.result == REFUSED:
        return row.auto.message.rpartition("; ")[2]
    text = row.scheduler.message.replace(f"{row.architecture} cannot run under the rolling batch: ", "")
    return text.partition(";")[0].rpartition(": architecture ")[2].replace("|", "").strip()

"""Merges the metrics of engines into one text.

Every worker reports the same families. Prometheus allows the head of a family only once, with all of its samples
behind it, so that the texts cannot simply be joined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_HEAD = re.compile(r"# (HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})? (.+)")


def joined(texts: Mapping[tuple[str, str], bytes]) -> bytes:
    """Merge texts in Prometheus' format. Model and worker, the keys of `texts`, become labels of every sample."""
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for (model, worker), text in texts.items():
        labels = f'model="{_escaped(model)}",worker="{_escaped(worker)}"'
        family = ""
        for line in text.decode().splitlines():
            head = _HEAD.match(line)
            if head is not None:
                family = head[2]
                heads.setdefault(family, {}).setdefault(head[1], line)
                samples.setdefault(family, [])
            elif (sample := _SAMPLE.fullmatch(line)) is not None:
                own = f",{sample[2]}" if sample[2] else ""
                samples.setdefault(family, []).append(f"{sample[1]}{{{labels}{own}}} {sample[3]}")
    lines = [line for family in samples for line in (*heads.get(family, {}).values(), *samples[family])]
    return "".join(f"{line}\n" for line in lines).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

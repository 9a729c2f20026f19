"""Prints the lines that a request holds, as user code prints its metrics."""

from __future__ import annotations

import sys

from djl_python import Input, Output


def handle(inputs: Input) -> Output | None:
    if inputs.is_empty():
        return None
    asked = inputs.get_as_json()
    for line in asked["lines"]:
        print(line, file=sys.stderr if asked.get("stderr") else sys.stdout, flush=True)
    return Output().add_as_json({"printed": len(asked["lines"])})

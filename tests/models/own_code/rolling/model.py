"""A handler that batches itself, step by step: each request gets its words back, one a step. For tests only."""

from __future__ import annotations

from djl_python import Input, Output

live: list[list[str]] = []
steps = 0
most = 0


def handle(inputs: Input) -> Output | None:
    global steps, most
    if inputs.is_empty():
        return None
    if inputs.get_property("reset_rollingbatch"):
        live.clear()
    batches = inputs.get_batches()
    for item in batches[len(live) :]:
        assert item.get_as_bytes("seed").isdigit()
        live.append(item.get_as_string().split())
    assert all(item.get_as_bytes() == b"" for item in batches[: len(live) - len(batches)])
    steps += 1
    most = max(most, len(live))
    output = Output()
    for index, words in enumerate(live):
        word = words.pop(0) if words else ""
        if word == "raise":
            raise ValueError("in a step")
        result = {"data": str(most) if word == "most" else word + " ", "last": not words}
        if word == "error":
            result |= {"data": "", "last": True, "error": "this one is refused", "code": 424}
            words.clear()
        output.add(Output.binary_encode(result), key="data", batch_index=index)
        output.add_property(f"batch_{index}_Content-Type", "text/plain")
    live[:] = [words for words in live if words]
    return output

"""A handler in LMI's contract; the header x-case says what it shows. For tests only."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from djl_python import Input, Output
from djl_python.encode_decode import decode, encode

PROPERTIES = ("X-Mine", "A", "requestId", "CONTENT-TYPE")
initial: dict[str, Any] = {}


def handle(inputs: Input) -> Any:
    if inputs.is_empty():
        initial.update(inputs.get_properties())
        return None
    case = inputs.get_property("X-Case")
    if not inputs.is_batch() and case in WHOLE:
        return WHOLE[case](inputs)
    output = Output()
    for index, item in enumerate(inputs.get_batches()):
        _answer(output, item, index if inputs.is_batch() else None)
    return output


def _answer(output: Output, item: Input, index: int | None) -> None:
    match item.get_property("x-case"):
        case "raise":
            raise ValueError("this one is broken")
        case "error":
            output.error("this one is refused", code=422, batch_index=index)
        case "nothing":
            return
        case "header":
            output.add_property("x-own" if index is None else f"batch_{index}_x-own", item.get_as_string())
            output.add("", batch_index=index)
        case "initial":
            output.add({**initial, "cwd": os.getcwd()}, batch_index=index)
        case "request":
            output.add(
                {
                    "properties": {name: item.get_property(name) for name in PROPERTIES},
                    "content": [
                        [key, value.decode()]
                        for key, value in zip(item.content.get_keys(), item.content.get_values(), strict=True)
                    ],
                    "is_empty": item.is_empty(),
                },
                batch_index=index,
            )
        case "data":
            data = item.get_data()
            value = data.size if hasattr(data, "size") and hasattr(data, "convert") else data
            output.add({"type": type(data).__name__, "data": _plain(value)}, batch_index=index)
        case "decoded":
            output.add(_plain(decode(item, item.get_property("Content-Type"))), batch_index=index)
        case _:
            output.add(item.get_as_bytes(), batch_index=index)
            if index is None:
                output.add_property("Content-Type", item.get_property("Content-Type") or "text/plain")


def _plain(value: Any) -> Any:
    if isinstance(value, bytearray):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [item.tolist() if isinstance(item, np.ndarray) else item for item in value]
    return value


def _encoded(inputs: Input) -> Output:
    prediction: Any = {"a": [1, 2]} if "json" in inputs.get_property("Accept") else [[1.0, 2.0], [3.0, 4.0]]
    if "tensor" in inputs.get_property("Accept"):
        prediction = [np.array(prediction, dtype=np.float32)]
    return encode(Output(), prediction, inputs.get_property("Accept"))


def _stream(inputs: Input) -> Output:
    words = inputs.get_as_string().split()

    def items() -> Any:
        for word in words:
            if word == "raise":
                raise ValueError("in the stream")
            yield word

    output = Output().add_property("Content-Type", "application/jsonlines")
    if "finalize" in words:
        output.finalize(_touch, inputs.get_property("x-file"))
    form = inputs.get_property("x-form")
    if form == "none":
        return output.add_stream_content(items(), None)
    return output.add_stream_content(items(), str.upper) if form == "upper" else output.add_stream_content(items())


def _finalized(inputs: Input) -> Output:
    return Output().add("on its way").finalize(_touch, inputs.get_property("x-file"))


def _touch(name: str) -> None:
    Path(name).touch()
    raise ValueError("nobody hears of this")


def _memory(inputs: Input) -> Output:
    raise MemoryError("17 GiB")


def _wait(inputs: Input) -> Output:
    while not Path(inputs.get_property("x-file")).exists():
        time.sleep(0.001)
    return Output().add("done")


WHOLE: dict[str, Any] = {
    "none": lambda inputs: None,
    "reset": lambda inputs: Output(205).add("left out"),
    "reset in pieces": lambda inputs: Output(205).add_stream_content(iter(["left", "out"])),
    "nothing in pieces": lambda inputs: Output(204).add_stream_content(iter(["left", "out"])),
    "type": lambda inputs: {"not": "an Output"},
    "code": lambda inputs: Output(418, "a teapot").add("short and stout").add_property("x-pot", "tea"),
    "empty code": lambda inputs: Output(503, "come back later"),
    "empty code in no ASCII": lambda inputs: Output(503, "später"),
    "bad code": lambda inputs: Output(1000).add("a"),
    "json": lambda inputs: Output().add_as_json({"a": [1, "é"]}),
    "nan": lambda inputs: Output().add_as_json({"a": float("nan")}),
    "headers": lambda inputs: (
        Output()
        .add("a")
        .add_property("x-break", "a\r\nx-injected: 1")
        .add_property("Content-Length", "9999")
        .add_property("not a name", "1")
        .add_property("x-other", "é")
    ),
    "late error": lambda inputs: Output().add("half").add_stream_content(iter("half")).error("no more", code=422),
    "keys": lambda inputs: Output().add("first").add("second", key="data").add("third", key="b"),
    "stream": _stream,
    "finalize": _finalized,
    "memory": _memory,
    "encode": _encoded,
    "wait": _wait,
}


def predict(inputs: Input) -> Output | None:
    return None if inputs.is_empty() else Output().add("predicted")

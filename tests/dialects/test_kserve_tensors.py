"""Inference requests of the Open Inference Protocol that cannot be read are refused, whatever is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects.kserve.tensors import nest, read


def body(shape: list[int], data: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "a", "datatype": "INT64", "shape": shape, "data": data}]}).encode()


def deep(levels: int) -> Any:
    data: Any = [1]
    for _ in range(levels):
        data = [data]
    return data


@pytest.mark.parametrize(
    ("sent", "headers", "message"),
    [
        (b'{"inputs": "\xff"}', {}, "cannot be read"),
        (b'{"inputs": [], "a": ' + b"[" * 5000, {}, "cannot be read|nested too deeply"),
        (b'{"inputs": [], "parameters": ' + b'{"a":' * 100_000, {}, "nested too deeply"),
        (body([1], deep(900)), {}, "nested more deeply than its shape"),
        (body([1] * 5000, [1]), {}, "more than 64 dimensions"),
        (b"{}", {"inference-header-content-length": "9" * 5000}, "is not the length"),
        (b"{}", {"inference-header-content-length": "3"}, "is not the length"),
    ],
)
def test_requests_that_cannot_be_read(sent: bytes, headers: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(Input("v2/infer", headers, [("data", sent)]))


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1, 2], 3, 4]])
def test_elements_are_in_one_list_or_in_those_of_the_shape(data: list[Any]) -> None:
    (tensor,) = read(Input("v2/infer", {}, [("data", body([2, 2], data))])).inputs
    assert nest(tensor) == [[1, 2], [3, 4]]

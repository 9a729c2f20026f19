from __future__ import annotations

import pytest

from frontend.inference import model_named_in
from lmi_server.contract.errors import RequestError


def test_the_body_names_the_model() -> None:
    assert model_named_in(b'{"model": "first"}') == "first"
    assert model_named_in(b'\xef\xbb\xbf{"x": [1], "model": "alias"}') == "alias"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"model": 1}', b'{"model": "\xff"}'])
def test_a_body_that_names_none(body: bytes) -> None:
    assert model_named_in(body) is None


def test_a_body_that_is_nested_too_deeply() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        model_named_in(b'{"x": ' + b"[" * 100_000)

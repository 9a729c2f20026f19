"""Forms of OpenAI's images."""

from __future__ import annotations

import pytest

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import routes
from lmi_server.dialects.openai.images import read_body


def form(*names: str) -> Input:
    fields = "".join(f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n1\r\n' for name in names)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    return Input(routes.IMAGES_EDITS, headers, [("data", f"{fields}--b--\r\n".encode())])


def test_a_repeated_field_is_named_and_bounded() -> None:
    assert read_body(form("a", "image")) == {"a": "1", "image": b"1"}
    with pytest.raises(RequestError, match=r"^a is in the form more than once"):
        read_body(form("b", "a", "b", "a"))
    with pytest.raises(RequestError, match=r"^x{100}\.\.\. \(5000 characters\) is in the form"):
        read_body(form("x" * 5000, "x" * 5000))


def test_more_fields_than_any_client_sends_are_refused() -> None:
    with pytest.raises(RequestError, match="more than 1000 fields"):
        read_body(form(*map(str, range(1001))))

from __future__ import annotations

import pytest

from lmi_server.contract.texts.sizes import in_words


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_in_words(size: int, words: str) -> None:
    assert in_words(size) == words

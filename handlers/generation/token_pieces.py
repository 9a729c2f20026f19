"""What single tokens add to a text that ends with a whole character, without a call of the tokenizer.

Decoders of byte-level BPE join the bytes of all tokens; sentencepiece's join texts, with "▁" for a space.
Both change the first token of a text only, and bytes that make no character. So every other token has one piece.
"""

from __future__ import annotations

import json
from typing import Any

_JOINING = frozenset({"Fuse", "Strip", "ByteFallback"})  # beside Replace, in the order that sentencepiece's have
_REPLACEMENT = "\ufffd"


class TokenPieces:
    """The pieces of a fast tokenizer's tokens; each is found on first use and then kept."""

    def __init__(self, tokenizer: Any) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._kind = None if backend is None else _kind_of(_decoder(backend))
        self._backend: Any = backend
        self._bytes = _byte_of_character() if self._kind == "bytes" else {}
        self._found: dict[int, str | None] = {}
        if self._kind is not None:
            added = backend.get_added_tokens_decoder()
            self._found = {token: None for token, entry in added.items() if entry.special}

    def piece(self, token: int) -> str | None:
        """Return what the token adds; None if only the decoder knows: special tokens, parts of characters."""
        try:
            return self._found[token]
        except KeyError:
            piece = self._found[token] = self._find(token)
            return piece

    def _find(self, token: int) -> str | None:
        text = None if self._kind is None else self._backend.id_to_token(token)
        if not text:
            return None
        if self._kind == "bytes":
            return self._from_bytes(text)
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        return None if is_byte or text.endswith(_REPLACEMENT) else text.replace("▁", " ")

    def _from_bytes(self, text: str) -> str | None:
        """Return the text of a byte-level token if its bytes are whole characters."""
        try:
            data = bytes(self._bytes[character] for character in text)
        except KeyError:
            data = text.encode()  # an added token, which is written as it is
        try:
            piece = data.decode()
        except UnicodeDecodeError:
            return None
        return None if piece.endswith(_REPLACEMENT) else piece


def _decoder(backend: Any) -> Any:
    """Return the decoder of a tokenizer as its file has it, None if it has none."""
    return None if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _kind_of(decoder: Any) -> str | None:
    """Return what tokens of a decoder are to it: "bytes" or "text"; None if they may change each other."""
    parts = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else [decoder or {"type": ""}]
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        return "bytes"
    if types == ["Metaspace"]:
        return "text" if parts[0]["replacement"] == "▁" else None
    if types[:1] != ["Replace"] or not set(types[1:]) <= _JOINING or "Fuse" not in types:
        return None
    strips = [part for part in parts if part["type"] == "Strip"]
    if any(part["content"] != " " or part["stop"] for part in strips):
        return None
    return "text" if (parts[0]["pattern"], parts[0]["content"]) == ({"String": "▁"}, " ") else None


def _byte_of_character() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + place): byte for place, byte in enumerate(others)}

"""What the value of an option names: nothing, a model, a file, or code. It decides what a registration may say.

Every option that takes free text declares it with one of the marks below, beside the others in `Annotated`. Numbers,
true and false and the values of a Literal name nothing, so that such options need no mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What a text names; of two handlers that declare one key, the higher kind counts."""

    NOTHING = 0
    REVISION = 1  # a branch or tag of a model on the Hub
    MODEL = 2  # a directory, an archive, a file in GGUF, the id of a model on the Hub, or s3://bucket/prefix
    PATH = 3  # a file or directory; a relative one is in the directory of the model
    TEMPLATE = 4  # a file, or the text of a template, which has a brace
    CODE = 5  # a file of the model, or the name of a built-in handler
    OPERATOR = 6  # what only the operator decides: code to import, variables of workers, and what guards the server


@dataclass(frozen=True, slots=True)
class Reference:
    """The mark of an option: the kind of its text, or of the texts `within` its JSON by their key, None without JSON.

    Texts in `words` name nothing. Texts of JSON under any other key are of the kind of the option itself.
    """

    kind: Kind
    words: frozenset[str] = frozenset()
    within: Mapping[str, Kind] | None = None


def _texts(*keys: str) -> dict[str, Kind]:
    return dict.fromkeys(keys, Kind.NOTHING)


NAMES_NOTHING = Reference(Kind.NOTHING)
NAMES_REVISION = Reference(Kind.REVISION)
NAMES_MODEL = Reference(Kind.MODEL)
NAMES_DRAFT = Reference(Kind.MODEL, words=frozenset({"[ngram]", "ngram"}))
NAMES_PATH = Reference(Kind.PATH)
NAMES_PYTHON = Reference(Kind.OPERATOR, words=frozenset({"python3"}))
NAMES_TEMPLATE = Reference(Kind.TEMPLATE)
NAMES_CODE = Reference(Kind.CODE)
NAMES_DRAFTING = Reference(
    Kind.OPERATOR,
    words=NAMES_DRAFT.words,
    within={
        "model": Kind.MODEL,
        "revision": Kind.REVISION,
        **_texts("method", "quantization", "rejection_sample_method", "draft_sample_method"),
    },
)
NAMES_CONNECTOR = Reference(Kind.OPERATOR, within=_texts("kv_connector", "kv_role", "kv_buffer_device", "engine_id"))
NUMBERS_ONLY = Reference(Kind.OPERATOR, within={})
"""For JSON with numbers, true and false in it; a text in it may name anything."""
FOR_OPERATOR = Reference(Kind.OPERATOR)

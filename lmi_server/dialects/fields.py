"""Reads a request's body and its fields. Whatever is wrong raises a RequestError with the field, the value, the remedy.

A dialect declares its fields as a table of `Field`; `read_fields` checks a body against it. Most functions here are
readers: they take the name and the value of one field, and return the value to use.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Feature
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import NOT_FOR_TERMINALS, excerpt

Reader = Callable[[str, Any], Any]
"""Takes a field's name and its value (never null); returns the value to use or raises RequestError."""

_SHOWN_CHARACTERS = 60
_SHOWN_UNKNOWN = 8  # the search for the nearest known name is slow, and a hostile body may hold thousands of names
_FLOAT_LIMIT = 1.7e308  # a JSON integer may be larger than any float, and float() would raise
# The content types of clients whose user names none: boto3, and curl with -d.
_DEFAULT_TYPES = frozenset({"application/octet-stream", "application/x-www-form-urlencoded"})

_decode = msgspec.json.Decoder().decode


class Field(NamedTuple):
    """A known field. `target` is its key in what `read_fields` returns; None checks the field and drops it.

    `needs` is a feature that the model's handler must have, unless the value is `neutral` (None: empty, zero or false).
    """

    target: str | None
    read: Reader
    needs: Feature | None = None
    neutral: Any = None

    def lacks(self, value: Any, features: Collection[Feature]) -> bool:
        """Return whether `value` needs a feature that is not in `features`."""
        return self.needs not in features and bool(value if self.neutral is None else value != self.neutral)


def show(value: Any) -> str:
    """Return `value` for an error message: as shortened JSON; a list or an object by its kind only."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        cut = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "..."
        return msgspec.json.encode(cut).decode().translate(NOT_FOR_TERMINALS)
    return msgspec.json.encode(value).decode()[:_SHOWN_CHARACTERS]


def not_allowed(name: str, value: Any, remedy: str) -> RequestError:
    """Return the error about a value; `remedy` says what to send instead."""
    return RequestError(f"{name}: {show(value)} is not allowed; {remedy}")


def unsupported_error(name: str, feature: Feature | None = None) -> RequestError:
    """Return the error about a field whose feature the model's handler lacks."""
    parser = " and option.reasoning_parser" if feature == "reasoning" else ""
    return RequestError(
        f"{name} is not supported by the handler that serves this model; leave it out, or serve the model with"
        f" option.rolling_batch=vllm{parser}"
    )


# --- the body ---


def media_type(request: Input) -> str:
    """Return the body's media type in lower case without its parameters; "" if the client sent none."""
    sent = request.properties.get("content-type", "")
    return sent if sent == "application/json" else sent.partition(";")[0].strip().lower()


def json_object(request: Input) -> dict[str, Any]:
    """Return the body, which must be a JSON object. Raises RequestError."""
    value = json_value(request)
    if not isinstance(value, dict):
        raise RequestError(f"the body is {show(value)}; send a JSON object")
    return value


def json_value(request: Input) -> Any:
    """Return the body, which must be JSON. Raises RequestError."""
    return _json(json_body(request))


def json_body(request: Input) -> bytes:
    """Return the bytes of a body that is to be JSON. Raises RequestError if it has another type, or is empty."""
    kind = media_type(request)
    body = request.body().removeprefix(codecs.BOM_UTF8)
    # A default type says nothing about the body, so its first character decides.
    taken_as_json = kind in _DEFAULT_TYPES and body.lstrip().startswith((b"{", b"["))
    if kind and not kind.startswith("application/json") and not taken_as_json:
        raise RequestError(f"Content-Type: {show(kind)} is not supported; send application/json")
    if not body or body.isspace():
        raise RequestError("the body is empty; send a JSON object")
    return body


def _json(body: bytes) -> Any:
    try:
        return _decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply; send a flat JSON object") from None
    except ValueError as error:  # msgspec's DecodeError, and UnicodeDecodeError
        raise RequestError(f"the body is not valid JSON: {error}; send a JSON object in UTF-8") from None


def plain_text(request: Input) -> str:
    """Return the body, which must be UTF-8. Raises RequestError."""
    try:
        return request.body().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8: {error}; send the prompt in UTF-8") from None


_QUESTION_COLUMNS = ("question", "context")


def csv_inputs(request: Input) -> list[Any]:
    """Return the rows of a body in CSV: its column `inputs`, or objects of `question` and `context`.

    Raises RequestError.
    """
    reader = csv.DictReader(io.StringIO(plain_text(request).removeprefix("\ufeff")), strict=True)
    try:
        columns, rows = tuple(reader.fieldnames or ()), list(reader)
    except csv.Error as error:
        raise RequestError(f"the body is not valid CSV: {error}; quote fields that hold commas or lines") from None
    if not set(_QUESTION_COLUMNS) - set(columns):
        return [{name: row[name] for name in _QUESTION_COLUMNS} for row in rows]
    if "inputs" in columns:
        return [row["inputs"] for row in rows]
    shown = show(", ".join(columns))
    raise RequestError(f"the first line of the CSV is {shown}; begin with a line `inputs` or `question,context`")


# --- fields ---


def read_fields(
    body: Mapping[str, Any], known: Mapping[str, Field], prefix: str = "", features: Collection[Feature] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the known fields by target, and the unknown names. A field that is null counts as absent.

    `prefix` precedes the names in messages; `features` are the features of the model's handler. Raises RequestError.
    """
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        field = known.get(name)
        if field is None:
            unknown.append(name)
            continue
        target, read, needs, _ = field
        found = read(prefix + name, value)
        if needs is not None and field.lacks(found, features):
            raise unsupported_error(prefix + name, needs)
        if target is not None:
            values[target] = found
    return values, unknown


def unknown_warnings(unknown: list[str], known: Mapping[str, Field], prefix: str = "") -> tuple[str, ...]:
    """Return a warning for each of the first unknown names, with the nearest known one; the last counts the rest."""
    if not unknown:
        return ()
    # Suggest only fields that have an effect.
    names = [name for name, field in known.items() if field.target is not None]
    warnings = [_unknown_warning(name, names, prefix) for name in unknown[:_SHOWN_UNKNOWN]]
    if len(unknown) > _SHOWN_UNKNOWN:
        warnings.append(f"{len(unknown) - _SHOWN_UNKNOWN} more unknown fields are ignored")
    return tuple(warnings)


def _unknown_warning(name: str, known: list[str], prefix: str) -> str:
    near = difflib.get_close_matches(name[:_SHOWN_CHARACTERS], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{prefix}{excerpt(name, _SHOWN_CHARACTERS)} is not known and is ignored{hint}"


def integer(minimum: int, maximum: int | None = None) -> Reader:
    """Return the reader of an integer within bounds; 3.0 and "3" count as 3, and true is no number."""
    remedy = f"send an integer >= {minimum}" if maximum is None else f"send an integer from {minimum} to {maximum}"

    def read(name: str, value: Any) -> int:
        if not isinstance(value, int):
            value = _as_integer(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise not_allowed(name, value, remedy)
        if value < minimum or (maximum is not None and value > maximum):
            raise not_allowed(name, value, remedy)
        return value

    return read


def _as_integer(value: Any) -> Any:
    """Return a whole number that is written as a float or as text as an integer, and anything else unchanged.

    LMI reads requests with pydantic, which takes numbers and switches as text too.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= 20 and value.isascii() and value.removeprefix("-").isdecimal():
        return int(value)
    return value


def number(allowed: Callable[[float], bool], description: str) -> Reader:
    """Return the reader of a finite number for which `allowed` is true; `description` says which these are."""
    remedy = f"send {description}"

    def read(name: str, value: Any) -> float:
        if isinstance(value, str):
            value = _as_number(value)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise not_allowed(name, value, remedy)
        if not -_FLOAT_LIMIT < value < _FLOAT_LIMIT or not allowed(value):
            raise not_allowed(name, value, remedy)
        return float(value)

    return read


def _as_number(text: str) -> float | str:
    try:
        return float(text) if len(text) <= _LONGEST_NUMBER else text
    except ValueError:
        return text


_LONGEST_NUMBER = 40  # characters
_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "0", "f", "n"), False),
}


def boolean(name: str, value: Any) -> bool:
    """Read true or false, also as the texts and the numbers 0 and 1 that LMI takes for them."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, int)):
        found = _SWITCHES.get(str(value).lower())
        if found is not None:
            return found
    raise not_allowed(name, value, "send true or false")


def early_stopping(name: str, value: Any) -> bool | str:
    """Read when generate()'s beam search ends: true, false or "never"."""
    return value if value == "never" else boolean(name, value)


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise not_allowed(name, value, "send a string")
    return value


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """Read a non-empty string, or a list of them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise not_allowed(name, value, "send a string or a list of strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise not_allowed(name, item, "send strings that are not empty")
    return tuple(items)


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Read a list of non-empty strings."""
    if not isinstance(value, list):
        raise not_allowed(name, value, "send a list of strings")
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise not_allowed(f"{name}[{index}]", item, "send strings that are not empty")
    return tuple(value)


def objects(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise not_allowed(name, value, "send a list of objects")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise not_allowed(name, value, "send an object")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise not_allowed(name, value, "send a list of token ids")
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) <= _LARGEST_TOKEN_ID:
        return tuple(value)  # checked one by one, a long prompt would keep the worker from its streams
    if len(value) > _MAX_OTHER_IDS:
        raise not_allowed(name, value, f"send token ids as integers from 0 to {_LARGEST_TOKEN_ID}")
    return tuple([_TOKEN_ID(name, item) for item in value])


_LARGEST_TOKEN_ID = 2**31 - 1
_MAX_OTHER_IDS = 10_000  # that may be written as 1.0 or "1"
_TOKEN_ID = integer(0, _LARGEST_TOKEN_ID)


def bad_words(name: str, value: Any) -> tuple[str, ...]:
    """Read words that are not to be generated; each is tokenized twice before anything else runs."""
    words = strings(name, value)
    if len(words) > _MAX_BAD_WORDS or max(map(len, words), default=0) > _LONGEST_BAD_WORD:
        remedy = f"send at most {_MAX_BAD_WORDS} words of at most {_LONGEST_BAD_WORD} characters"
        raise not_allowed(name, value, remedy)
    return words


_MAX_BAD_WORDS = 1000
_LONGEST_BAD_WORD = 100


def top_k(name: str, value: Any) -> int:
    """Read top_k. vLLM switches it off with -1, LMI with 0: both become 0."""
    return max(0, int(_TOP_K(name, value)))


_TOP_K = integer(-1, 2**31 - 1)


def logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise not_allowed(name, value, "send an object of token id to bias")
    if len(value) > _MAX_BIASES:
        raise RequestError(f"{name}: {len(value)} biases are not allowed; send at most {_MAX_BIASES}")
    return {int(_TOKEN_ID(name, token)): _BIAS(f"{name}.{excerpt(token, 20)}", bias) for token, bias in value.items()}


_MAX_BIASES = 5000
_BIAS = number(lambda value: -100 <= value <= 100, "a number from -100 to 100")


def one(remedy: str) -> Reader:
    """Return the reader of a count that must be 1."""

    def read(name: str, value: Any) -> None:
        if isinstance(value, bool) or value != 1:
            raise not_allowed(name, value, remedy)

    return read


def one_of(*allowed: str) -> Reader:
    """Return the reader of a text that must be one of `allowed`."""

    def read(name: str, value: Any) -> str:
        if value not in allowed:
            raise not_allowed(name, value, f"send {' or '.join(allowed)}")
        return str(value)

    return read


def off(remedy: str) -> Reader:
    """Return the reader of a feature that this server does not have: only false, 0 and empty values pass."""

    def read(name: str, value: Any) -> None:
        if value:
            raise RequestError(f"{name} is not supported; {remedy}")

    return read


def ignored(name: str, value: Any) -> None:
    """Accept any value of a field that does not affect the answer."""


# Readers of the fields that several dialects have.
LOGPROBS = integer(0, 20)
MAX_TOKENS = integer(1, 2**31 - 1)
SEED = integer(-(2**63), 2**64 - 1)
TEMPERATURE = number(lambda value: value >= 0, "a number >= 0 (0 is greedy)")
PROBABILITY = number(lambda value: 0 < value <= 1, "a number above 0 and up to 1")
MIN_P = number(lambda value: 0 <= value <= 1, "a number from 0 to 1")
REPETITION = number(lambda value: value > 0, "a number above 0 (1 is off)")
PENALTY = number(lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is off)")

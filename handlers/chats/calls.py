"""Reads calls of tools out of the text between two markers, piece by piece as the model writes it.

transformers' response parsing finds the markers, but it gives a call only when its end has come, and fails if the text
between them is not JSON. A client wants the arguments as they are written. So these readers take over between the
markers. They pass arguments on as soon as the name of the function is known, and report what is no call.
"""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import regex

_BETWEEN = " \t\r\n,;[]}`"  # what may stand before, between and after calls


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call: `name` begins the next one, `arguments` continue it."""

    name: str | None
    arguments: str = ""


class CallReader(ABC):
    """Reads the calls between two markers. `schemas` has the parameters of each function that the request offers."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._unread = ""

    @abstractmethod
    def feed(self, text: str) -> list[CallPiece]:
        """Take more text; return what it adds to the calls."""

    @abstractmethod
    def close(self, closed: bool) -> list[CallPiece]:
        """Return what the end of the text adds. `closed`: the marker behind the calls has come, not the token limit."""

    @property
    def rest(self) -> str:
        """Return the text that belongs to no call; asked for after `close`."""
        return self._unread if self._unread.strip(_BETWEEN) else ""

    @property
    def is_cut_call(self) -> bool:
        """Return whether the text is a call, or calls, if a limit ends it here; asked for before `close`.

        Behind a marker it is.
        """
        return True


class JsonCalls(CallReader):
    """Reads calls whose arguments are a JSON object behind a header with the name.

    `header` matches everything before the arguments. If `known`, only functions of the request count: a model without
    markers for calls may also mean JSON as its answer.
    """

    def __init__(self, schemas: Mapping[str, Any], header: regex.Pattern[str], known: bool = False) -> None:
        super().__init__(schemas)
        self._header = header
        self._known = known
        self._object: _ObjectEnd | None = None
        self._irregular = False
        self._called = False

    def feed(self, text: str) -> list[CallPiece]:
        self._unread += text
        pieces: list[CallPiece] = []
        while not self._irregular:
            piece = self._begin() if self._object is None else self._continue(self._object)
            if piece is None:
                break
            pieces.append(piece)
        return pieces

    def _begin(self) -> CallPiece | None:
        """Return the beginning of a call if all of its header is there."""
        found = self._header.match(self._unread, partial=True)
        if found is None or (not found.partial and self._known and found["name"] not in self._schemas):
            self._irregular = True
            return None
        if found.partial:
            return None
        self._unread = self._unread[found.end() :]
        self._object, self._called = _ObjectEnd(), True
        return CallPiece(found["name"])

    def _continue(self, value: _ObjectEnd) -> CallPiece | None:
        """Return the arguments as far as they are there."""
        if not self._unread:
            return None
        end = value.find(self._unread)
        arguments, self._unread = self._unread[:end], "" if end is None else self._unread[end:]
        if end is not None:
            self._object = None
        return CallPiece(None, arguments)

    @property
    def is_cut_call(self) -> bool:
        return self._called or not self._known or _begins_name(_JSON_NAME, self._unread, self._schemas)

    def close(self, closed: bool) -> list[CallPiece]:
        if self._called or self._object is not None:
            return []
        calls = list(_whole_calls(self._unread))
        if not calls or (self._known and any(name not in self._schemas for name, _ in calls)):
            return []
        self._unread = ""
        return [piece for name, arguments in calls for piece in (CallPiece(name), CallPiece(None, arguments))]


_JSON_NAME = regex.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]*)')
_PYTHON_NAME = regex.compile(r"\s*\[\s*(?P<name>[\w.]*)")


def _begins_name(pattern: regex.Pattern[str], text: str, schemas: Mapping[str, Any]) -> bool:
    """Return whether `text` begins with the name of a function of the request, or with the start of one."""
    found = pattern.match(text)
    return found is not None and any(name.startswith(found["name"]) for name in schemas)


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the index behind the object's last character in `text`, the next piece of it; None if it goes on."""
        for index, character in enumerate(text):
            if self._in_string:
                self._step_in_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None

    def _step_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def _whole_calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of calls that have another order of keys; nothing if any of them is no call."""
    calls: list[tuple[str, str]] = []
    for value in _json_values(text):
        for item in value if isinstance(value, list) else [value]:
            call = _whole_call(item)
            if call is None:
                return
            calls.append(call)
    yield from calls


def _json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values that follow each other in `text`; then None if the text is anything else."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] in " \t\r\n,;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # deeper than Python's parser goes
            yield None
            return
        yield value


def _whole_call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    call = value.get("function", value)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return (call["name"], arguments) if is_object(arguments) else None
    return (call["name"], _dump(arguments)) if isinstance(arguments, dict) else None


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class TaggedCalls(CallReader):
    """Reads calls that have a tag for each argument; the schema of the function says which values are texts.

    `header` matches up to the first argument. `argument` has the groups `key` and `value`; `last` is the same for an
    argument that the model did not close.
    """

    def __init__(
        self,
        schemas: Mapping[str, Any],
        header: regex.Pattern[str],
        argument: regex.Pattern[str],
        last: regex.Pattern[str],
    ) -> None:
        super().__init__(schemas)
        self._header = header
        self._argument = argument
        self._last = last
        self._properties: Mapping[str, Any] | None = None
        self._count = 0

    def feed(self, text: str) -> list[CallPiece]:
        self._unread += text
        pieces = [] if self._properties is not None else self._begin()
        if self._properties is not None:
            pieces += self._arguments(self._argument)
        return pieces

    def _begin(self) -> list[CallPiece]:
        found = self._header.match(self._unread, partial=True)
        if found is None or found.partial:
            return []
        self._unread = self._unread[found.end() :]
        schema = self._schemas.get(found["name"]) or {}
        self._properties = schema.get("properties") or {}
        return [CallPiece(found["name"])]

    def _arguments(self, pattern: regex.Pattern[str]) -> list[CallPiece]:
        pieces = []
        while found := pattern.match(self._unread):
            self._unread = self._unread[found.end() :]
            key = found["key"].strip()
            value = _as_type(found["value"], (self._properties or {}).get(key))
            pieces.append(CallPiece(None, f"{', ' if self._count else '{'}{_dump(key)}: {_dump(value)}"))
            self._count += 1
        return pieces

    def close(self, closed: bool) -> list[CallPiece]:
        if self._properties is None and closed:  # a call without arguments ends with its name
            self._unread += "<"
            pieces = self._begin()
            self._unread = self._unread.removesuffix("<")
        else:
            pieces = []
        if self._properties is None:
            return []
        if closed:
            pieces += self._arguments(self._last)
        if self._unread.strip() or not closed:
            return pieces
        return [*pieces, CallPiece(None, "}" if self._count else "{}")]

    @property
    def rest(self) -> str:
        return self._unread if self._properties is None else ""


_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _as_type(text: str, schema: Any) -> Any:
    """Return the value that `text` stands for by its JSON schema: a text, unless the schema has another type."""
    types = frozenset(_types(schema))
    if not types or types == {"string"}:
        return text
    word = text.strip().lower()
    if word in _WORDS and not ("string" in types and word == "none"):
        return _WORDS[word]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if "string" in types and not isinstance(value, dict | list) else value


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    declared = schema.get("type", ())
    yield from (declared,) if isinstance(declared, str) else declared
    for kind in ("anyOf", "oneOf"):
        for choice in schema.get(kind) or ():
            yield from _types(choice)


class PythonCalls(CallReader):
    """Reads calls in the form of Python's: `[weather(city="Paris"), clock()]`, or one in a line.

    A call is given when the last one is complete, because Python's parser reads no pieces. `known` means
    what it means in `JsonCalls`.
    """

    def __init__(self, schemas: Mapping[str, Any], known: bool = False) -> None:
        super().__init__(schemas)
        self._known = known

    def feed(self, text: str) -> list[CallPiece]:
        self._unread += text
        return []

    @property
    def is_cut_call(self) -> bool:
        return not self._known or _begins_name(_PYTHON_NAME, self._unread, self._schemas)

    def close(self, closed: bool) -> list[CallPiece]:
        try:
            calls = [_python_call(node) for node in _python_nodes(self._unread.strip())]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        if self._known and any(name not in self._schemas for name, _ in calls):
            return []
        self._unread = ""
        return [piece for name, arguments in calls for piece in (CallPiece(name), CallPiece(None, arguments))]


def _python_nodes(text: str) -> list[ast.expr]:
    nodes: list[ast.expr] = []
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("not an expression")
        value = statement.value
        nodes += value.elts if isinstance(value, ast.List) else [value]
    return nodes


def _python_call(node: ast.expr) -> tuple[str, str]:
    """Return the name and the arguments of a call. Raises ValueError for anything but a call with arguments by name."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call with arguments by name")
    arguments = {keyword.arg: _python_value(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("a mapping in place of arguments")
    return ast.unparse(node.func), _dump(arguments)


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal; JSON's words (true, null) count as well. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(key): _python_value(value) for key, value in zip(node.keys, node.values, strict=True)
                if key is not None}  # fmt: skip
    return ast.literal_eval(node)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

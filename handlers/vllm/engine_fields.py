"""What vLLM's source says about the arguments of its engine: their names, and which values they take.

It is read, not imported, because `explain` and the front end need it too, and importing vLLM takes seconds and starts
CUDA. What the source leaves open is allowed here, and vLLM itself judges it when the model loads.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lmi_server.files.python_source import parse

_ARGUMENTS = "engine/arg_utils.py"
_NOT_PASSED_ON = ("model", "served_model_name")  # this server decides them
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?[kKmMgGtT]?")  # vLLM reads 1k and 1.5M in some places
SWITCH_VALUES: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def names() -> frozenset[str]:
    """Return the names of all fields of vLLM's EngineArgs that can be passed on; nothing if it is not installed."""
    return frozenset(_annotations()).difference(_NOT_PASSED_ON)


def allowed_instead(name: str, text: str) -> str | None:
    """Return in words what an argument takes, if it does not take `text`; None if it does, or if vLLM has to judge."""
    kinds = _kinds(name)
    if not kinds or text in ("", "None") or any(kind(text) for kind in kinds.values()):
        return None
    return " or ".join(kinds)


def literal(file: str, name: str) -> frozenset[str]:
    """Return the values of a Literal in a file of vLLM; nothing if there is none, or if it is made of others."""
    for node in source(file).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return _values(node.value)
    return frozenset()


def _values(node: ast.expr) -> frozenset[str]:
    is_literal = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
    parts = list(ast.walk(node.slice)) if is_literal and isinstance(node, ast.Subscript) else []
    if any(isinstance(part, ast.Name) for part in parts):
        return frozenset()
    return frozenset(str(part.value) for part in parts if isinstance(part, ast.Constant))


_Kinds = Mapping[str, Callable[[str], bool]]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


_SIMPLE: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "bool": ("true or false", lambda text: text.lower() in SWITCH_VALUES),
    "int": ("a number", lambda text: _NUMBER.fullmatch(text) is not None),
    "float": ("a number", lambda text: _NUMBER.fullmatch(text) is not None or text.lower() == "inf"),
    "dict": ("a JSON object", _is_object),
}


@cache
def _kinds(name: str) -> _Kinds:
    """Return how to recognise each kind of value of an argument, by its description; nothing if any may do."""
    annotation = _annotations().get(name)
    kinds: dict[str, Callable[[str], bool]] = {}
    for part in () if annotation is None else _members(annotation):
        found = _kind(part)
        if found is None:
            return {}
        kinds[found[0]] = found[1]
    return kinds


def _members(annotation: ast.expr) -> Iterator[ast.expr]:
    """Yield the types of a union, without None."""
    if isinstance(annotation, ast.BinOp):
        yield from _members(annotation.left)
        yield from _members(annotation.right)
    elif not (isinstance(annotation, ast.Constant) and annotation.value is None):
        yield annotation


def _kind(part: ast.expr) -> tuple[str, Callable[[str], bool]] | None:
    """Return the description and the test of a type's values; None if they are not known here."""
    name = ast.unparse(part.value if isinstance(part, ast.Subscript) else part)
    if name in _SIMPLE:
        return _SIMPLE[name]
    module = _imports().get(name, "")
    values = _values(part) or literal(f"{module.removeprefix('vllm.').replace('.', '/')}.py", name)
    return (", ".join(sorted(values)), values.__contains__) if values else None


@cache
def _annotations() -> Mapping[str, ast.expr]:
    classes = [
        node for node in source(_ARGUMENTS).body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")
    ]
    fields = [node for found in classes for node in found.body if isinstance(node, ast.AnnAssign)]
    named = {ast.unparse(field.target): field.annotation for field in fields}
    return {name: annotation for name, annotation in named.items() if not name.startswith("_")}


@cache
def _imports() -> Mapping[str, str]:
    """Return the module from which the file of the arguments imports each name."""
    found = (node for node in ast.walk(source(_ARGUMENTS)) if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in found for alias in node.names}


@cache
def source(file: str) -> ast.Module:
    """Return a file of vLLM, parsed; an empty module if it is not there."""
    spec = find_spec("vllm")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    return ast.Module([], []) if path is None or not path.is_file() else parse(path.read_text(encoding="utf-8"))

"""Finds out what a model.py defines by parsing it. The server process never runs code of a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmi_server.files.python_source import parse

MODEL_CODE = "model.py"
_SCRIPT = ("model_fn", "input_fn", "predict_fn", "output_fn", "transform_fn")

_HANDLER_CLASSES = frozenset({"LLMHandler", "RequestHandler", "AsyncRequestHandler"})
_EVERY_NAME = "*"  # `from x import *` may define any name


def takes_requests(path: Path) -> bool:
    """Return True if a file defines a function or class that takes requests.

    A file with a syntax error counts too: the worker then loads it, and reports the error with its line.
    """
    tree = _parse(path)
    if tree is None:
        return True
    names = set(_bound(tree.body))
    return not {"handle", "generate", _EVERY_NAME}.isdisjoint(names) or any(map(_is_handler, tree.body))


def framework_script(model_dir: Path, name: str) -> str | None:
    """Return the path, below `model_dir`, of a script for SageMaker's framework containers; None if there is none.

    It is in the folder code/ or beside the model, and defines at least one of the functions.
    """
    for place in (f"code/{name}", name):
        path = model_dir / place
        if path.is_file() and any(defines(path, function) for function in _SCRIPT):
            return place
    return None


def defines(path: Path, name: str) -> bool:
    """Return True if a file defines `name`, as far as parsing shows; a file with a syntax error counts."""
    tree = _parse(path)
    return tree is None or not {name, _EVERY_NAME}.isdisjoint(_bound(tree.body))


def _parse(path: Path) -> ast.Module | None:
    try:
        return parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None


def _bound(statements: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names that statements of a module bind, also inside of conditions and loops."""
    for node in statements:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case _:
                yield from _bound(list(ast.iter_child_nodes(node)))


def _is_handler(node: ast.stmt) -> bool:
    """Return True if the statement derives a class from a handler of lmi_server, judged by the name of its base."""
    if not isinstance(node, ast.ClassDef):
        return False
    return any(ast.unparse(base).rpartition(".")[2] in _HANDLER_CLASSES for base in node.bases)

"""What a model.py defines. It is read, never run: nothing of a model is executed in the server."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

MODEL_CODE = "model.py"

_HANDLER_CLASSES = frozenset({"LLMHandler", "RequestHandler", "AsyncRequestHandler"})
_EVERY_NAME = "*"  # of a module whose names are imported into this one


def takes_requests(path: Path) -> bool:
    """Tell whether a file defines what takes requests.

    What is no Python does too, so that loading it tells what is wrong.
    """
    tree = _parsed(path)
    if tree is None:
        return True
    names = set(_bound(tree.body))
    return not {"handle", "generate", _EVERY_NAME}.isdisjoint(names) or any(map(_is_handler, tree.body))


def defines(path: Path, name: str) -> bool:
    """Tell whether a file defines `name`, as far as reading it can tell; what is no Python does."""
    tree = _parsed(path)
    return tree is None or not {name, _EVERY_NAME}.isdisjoint(_bound(tree.body))


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None


def _bound(statements: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names that statements of a module bind, those inside its conditions and loops too."""
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
    """Tell whether a class is derived from a handler of lmi_server, by the name of its base."""
    if not isinstance(node, ast.ClassDef):
        return False
    return any(ast.unparse(base).rpartition(".")[2] in _HANDLER_CLASSES for base in node.bases)

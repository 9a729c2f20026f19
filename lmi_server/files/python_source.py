"""Parses Python source, for what is to be known of it without running it."""

from __future__ import annotations

import ast
import threading

# Python 3.11 counts the depth of all parsers of a process together: if the collector of garbage lets another thread
# run in the middle of one, `ast.parse` raises a SystemError (CPython's "AST constructor recursion depth mismatch").
_ONE_AT_A_TIME = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a module, in any thread. Raises SyntaxError or ValueError."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)

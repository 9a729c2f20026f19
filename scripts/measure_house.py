"""Measures the size and shape of this project's source: `python -m scripts.measure_house` prints a table.

Tests, benchmarks and scripts are left out. Complexity is McCabe's: one, and one more for each branch, loop, handler of
an exception, comprehension, condition in it, and further operand of `and` and `or`. A function's lines are those of its
code, without its docstring. Sentences are those of docstrings and comments.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("lmi_server", "handlers", "frontend")
_COMPAT = "lmi_server/compat/"  # its files are named as LMI's are
_ENVIRONMENT = ("environ", "getenv")
_MAX_COMPLEXITY = 10
_MAX_METHODS = 20
_MAX_MODULES = 12  # of a folder
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_INNER = (*_FUNCTIONS, ast.Lambda)
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.Assert)
_SUBORDINATE = re.compile(r"\b(?:which|that|those|what)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
_WORD = re.compile(r"\w+")
_ROW = re.compile(r" {4}|.*\S {2,}\S|- ")  # of a table or a list in a docstring


@dataclass(frozen=True)
class Module:
    """A source file: its name with dots, and its text, parsed."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @functools.cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """Every node of the tree: to walk it again for each row would take most of the time of the table."""
        return tuple(ast.walk(self.tree))


def read_modules(root: Path, packages: Iterable[str] = PACKAGES) -> list[Module]:
    """Return the modules of the packages below `root`, by path."""
    return [_module(root, path) for package in packages for path in sorted((root / package).rglob("*.py"))]


def _module(root: Path, path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    return Module(name, path, text, ast.parse(text))


def functions(modules: Iterable[Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method."""
    for module in modules:
        yield from (node for node in module.nodes if isinstance(node, _FUNCTIONS))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines the code of a function has, from its `def` to its end, without its docstring."""
    whole = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None or first.end_lineno is None:
        return whole
    return whole - (first.end_lineno - first.lineno + 1)


def complexity(function: ast.AST) -> int:
    """Return McCabe's complexity of a function, without that of functions in it."""
    return 1 + sum(map(_decisions, _own_nodes(function)))


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    waiting = [function]
    while waiting:
        own = [child for child in ast.iter_child_nodes(waiting.pop()) if not isinstance(child, _INNER)]
        yield from own
        waiting += own


def _decisions(node: ast.AST) -> int:
    if isinstance(node, _BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0


def import_cycles(modules: Sequence[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other when they are imported, each sorted by name."""
    names = {module.name for module in modules}
    known = {module.name: {name for name in _imported(module, names) if name in names} for module in modules}
    reach = {name: _reachable(name, known) for name in known}
    cycles = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in known}
    return [list(cycle) for cycle in sorted(cycles) if cycle]


def _imported(module: Module, names: Container[str]) -> Iterator[str]:
    """Yield what a module imports when it is imported: not in functions, nor for types alone."""
    for node in _executed(module.tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in names else node.module for name in inner)


def _executed(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        yield statement
        for_types = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test)
        if isinstance(statement, ast.If | ast.Try) and not for_types:
            yield from _executed([*statement.body, *statement.orelse])


def _reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def reads_environment(module: Module) -> bool:
    """Return whether a module reads environment variables itself."""
    return any(map(_names_environment, module.nodes))


def _names_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in _ENVIRONMENT for alias in node.names)
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.value.id == "os" and node.attr in _ENVIRONMENT


def sentences(module: Module) -> Iterator[str]:
    """Yield the sentences of a module's docstrings and comments."""
    for node in module.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            for block in _blocks(ast.get_docstring(node) or ""):
                yield from _split(block)
    for comment in _comments(module.text):
        yield from _split(comment)


def _blocks(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, and each row of its tables."""
    lines: list[str] = []
    for line in [*docstring.splitlines(), ""]:
        is_row = _ROW.match(line) is not None
        if is_row or not line.strip():
            yield " ".join(lines)
            lines = []
        lines.append(line)


def _comments(text: str) -> Iterator[str]:
    """Yield each comment; lines of their own that follow each other are one."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        is_whole_line = token.line.lstrip().startswith("#")
        if not is_whole_line or token.start[0] != last + 1:
            yield " ".join(block)
            block = []
        block.append(token.string.lstrip("#").strip())
        last = token.start[0] if is_whole_line else 0
    yield " ".join(block)


def _split(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(" ".join(text.split())) if len(_WORD.findall(part)) > 2]


def is_nested(sentence: str) -> bool:
    """Return whether a sentence has two or more of which, that, those and what."""
    return len(_SUBORDINATE.findall(sentence)) > 1


def modules_per_folder(modules: Iterable[Module], root: Path) -> Counter[str]:
    """Return how many modules lie in each folder itself, without `__init__.py`."""
    inside = (module.path for module in modules if module.path.name != "__init__.py")
    return Counter(path.parent.relative_to(root).as_posix() for path in inside)


def large_classes(modules: Iterable[Module]) -> Counter[str]:
    """Return the classes with too many methods, and how many they have; properties count, and no overloads."""
    classes = {
        f"{module.name}.{node.name}": len({part.name for part in node.body if isinstance(part, _FUNCTIONS)})
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    return Counter({name: count for name, count in classes.items() if count > _MAX_METHODS})


def large_folders(modules: Iterable[Module], root: Path) -> Counter[str]:
    """Return the folders with too many modules, and how many they have."""
    folders = modules_per_folder(modules, root)
    return Counter(
        {name: count for name, count in folders.items() if count > _MAX_MODULES and not f"{name}/".startswith(_COMPAT)}
    )


def table(root: Path, modules: Sequence[Module]) -> list[tuple[str, str]]:
    """Return the rows: what is measured, and how much it is."""
    lengths = sorted(module.lines for module in modules)
    found = list(functions(modules))
    sizes = sorted(map(code_lines, found))
    complex_ones = sum(complexity(function) > _MAX_COMPLEXITY for function in found)
    classes = Counter(node.name for module in modules for node in module.nodes if isinstance(node, ast.ClassDef))
    said = [sentence for module in modules for sentence in sentences(module)]
    folders = modules_per_folder(modules, root)
    below = {folder: count for folder, count in folders.items() if folder not in PACKAGES and _COMPAT not in folder}
    largest = max(below, key=lambda folder: below[folder])
    return [
        ("files / lines", f"{len(modules)} / {sum(lengths) / 1000:.1f}k"),
        ("module median / max", f"{statistics.median(lengths):.0f} / {lengths[-1]}"),
        (
            "function median / p90 / max",
            f"{statistics.median(sizes):.0f} / {sizes[len(sizes) * 9 // 10]} / {sizes[-1]}",
        ),
        (f"complexity > {_MAX_COMPLEXITY}", f"{100 * complex_ones / len(found):.1f} %"),
        ("import cycles", str(len(import_cycles(modules)))),
        ("files that read the environment", str(sum(map(reads_environment, modules)))),
        ("class names / in two files or more", f"{len(classes)} / {sum(count > 1 for count in classes.values())}"),
        ("modules at the root of " + ", ".join(PACKAGES), ", ".join(str(folders[package]) for package in PACKAGES)),
        ("largest flat folder below", f"{largest} {below[largest]}"),
        ("sentences with two or more of which/that/those/what", f"{100 * sum(map(is_nested, said)) / len(said):.1f} %"),
    ]


def main() -> int:
    modules = read_modules(ROOT)
    rows = table(ROOT, modules)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    for what, found in (
        (f"classes with more than {_MAX_METHODS} methods", large_classes(modules)),
        (f"folders with more than {_MAX_MODULES} modules", large_folders(modules, ROOT)),
    ):
        print(f"\n{what}:", *(f"  {name} {count}" for name, count in found.most_common()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

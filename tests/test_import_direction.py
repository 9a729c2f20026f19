"""Dependencies point one way, engines are imported late, and one module reads the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lmi_server", "handlers", "frontend")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ENGINES = {"torch", "transformers", "tokenizers", "accelerate", "vllm", "deepspeed", "tensorrt_llm", "gguf"}

# The composition root: the only module of lmi_server that may know the front end.
COMPOSITION_ROOT = "lmi_server/commands/cli.py"
ENVIRONMENT = "lmi_server/machine/environment.py"
# What a handler may use of lmi_server: the contract's types, the declarations of its options, the dialects' pure
# functions, what the machine has, and the one module that may set what the library of an engine reads from the
# environment.
TYPES = (
    "lmi_server.configuration.declaration",
    "lmi_server.machine.environment",
    "lmi_server.machine.inventory",
    "lmi_server.configuration.options",
    "lmi_server.configuration.tasks",
    "lmi_server.dialects",
    "lmi_server.contract.errors",
    "lmi_server.contract.generation",
    "lmi_server.contract.handler",
    "lmi_server.machine.process_tree",  # for what a handler starts beside its worker
    "lmi_server.contract.protocol",
    "lmi_server.contract.ranks",
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_engine_side(path: Path) -> bool:
    """Tell whether the module is in a package that a handler imports when it loads, where an engine is at home."""
    return path.parent.parent == ROOT / "handlers"


BY_NAME = {name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in MODULES}


def imported(tree: ast.AST, module: Path) -> Iterator[str]:
    """Yield each imported module in full; of `from a import b` that is `a.b` where b is a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(module)}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in BY_NAME else node.module


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def top_of(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    package = top_of(name_of(path).replace("/", "."))
    names = set(imported(parsed(path), path))
    if package == "lmi_server":
        assert not {name for name in names if top_of(name) == "handlers"}, "lmi_server names handlers by string only"
        assert name_of(path) == COMPOSITION_ROOT or not {name for name in names if top_of(name) == "frontend"}
    elif package == "frontend":
        assert not {name for name in names if top_of(name) == "handlers"}
    else:
        assert not {name for name in names if top_of(name) == "frontend"}
        assert not {name for name in names if top_of(name) == "lmi_server" and not name.startswith(TYPES)}


@pytest.mark.parametrize("path", [path for path in MODULES if not is_engine_side(path)], ids=name_of)
def test_no_engine_is_imported_when_a_module_is(path: Path) -> None:
    assert not {top_of(name) for name in reached(path)} & ENGINES


def reached(start: Path) -> set[str]:
    """Return every module that importing `start` imports, directly or through modules of ours."""
    found: set[str] = set()
    paths = [start]
    while paths:
        new = set(at_import(paths.pop())) - found
        found |= new
        paths += [BY_NAME[name] for name in new & BY_NAME.keys()]
    return found


@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path) != ENVIRONMENT], ids=name_of)
def test_one_module_reads_the_environment(path: Path) -> None:
    reads = {"environ", "environb", "getenv"}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in reads, f"{name_of(path)}:{node.lineno}: use process_environment()"


def test_no_module_is_imported_in_a_circle() -> None:
    graph = {name: set(at_import(path)) & BY_NAME.keys() - {name} for name, path in BY_NAME.items()}
    while free := [name for name, needs in graph.items() if not needs]:
        graph = {name: needs - set(free) for name, needs in graph.items() if name not in free}
    assert not graph, f"import circle among {sorted(graph)}"


def at_import(path: Path) -> Iterator[str]:
    """Yield what the module imports when it is imported itself, not when a function of it runs."""
    for node in parsed(path).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node, path)

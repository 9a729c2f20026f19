"""Dependencies point one way, engines are imported late, and one module reads the environment."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from feature_modules import BUILT_ON, feature_of
from paths import ROOT

from lmi_server.configuration.handlers import HANDLERS

PACKAGES = ("lmi_server", "handlers", "frontend")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ENGINES = {"torch", "transformers", "tokenizers", "accelerate", "vllm", "deepspeed", "tensorrt_llm", "gguf", "numba"}

# What each folder of lmi_server may import beside itself. Only the command line, the composition root, may import the
# front end. No folder imports handlers: the table of handlers names them in strings.
_CORE = {"contract", "files", "machine", "processes"}
_CONFIGURED = {*_CORE, "configuration"}
_SERVING = {*_CONFIGURED, "artifacts", "supervisor"}
MAY_IMPORT = {
    "contract": set[str](),
    "files": {"contract"},
    "features": set[str](),
    "client": _CORE,
    "plots": set[str](),
    "machine": {"contract"},
    "processes": {"contract", "machine"},
    "artifacts": {"contract"},
    "configuration": {*_CORE, "artifacts", "features"},
    "dialects": {"contract", "features"},
    "media": {"contract"},
    "batches": {*_SERVING, "client", "dialects", "serving"},
    "bench": {*_CORE, "client"},
    "advise": {*_CORE, "bench", "client"},
    "verify": {*_CORE, "bench", "client"},
    "canary": {*_CORE, "client", "commands"},
    "tune": {*_CONFIGURED, "bench", "client"},
    "schema": _CONFIGURED,
    "migrate": {*_CONFIGURED, "artifacts", "client", "explain"},
    "lsp": {*_CONFIGURED, "artifacts", "client", "explain"},
    "supervisor": _CONFIGURED,
    "explain": {*_CONFIGURED, "supervisor"},
    "serving": _SERVING,
    "worker": {*_CONFIGURED, "dialects", "media"},
    "ray": {*_SERVING, "client", "dialects", "explain", "serving", "worker"},
    "route": {*_SERVING, "dialects", "serving"},
    "commands": {*_SERVING, "client", "dialects", "explain", "features", "serving"},
    "__main__": {"commands"},
    # Public names for code of one's own; nothing of this project imports them.
    **{name: {"contract"} for name in ("errors", "generation", "handler", "protocol")},
}
# The same for the folders inside the larger packages. The modules beside them may import any folder.
_HTTP = {"http"}
_WATCHED = {*_HTTP, "access", "observability"}
_VALUES = {"declaration", "layers", "options"}
INSIDE_MAY_IMPORT = {
    "frontend": {
        "http": set[str](),
        "access": _HTTP,
        "observability": {*_HTTP, "features"},  # the latter for traces
        "management": {*_HTTP, "access"},
        "relay": {*_WATCHED, "management"},
        "storage": {*_HTTP, "access"},
        "detached": {*_HTTP, "features"},
        "sagemaker": {*_HTTP, "detached", "features", "storage"},
        "batches": {*_HTTP, "access", "detached", "features", "management", "relay", "storage"},
        "stored_responses": {*_HTTP, "detached", "features", "management", "relay", "storage"},
        "kserve": {*_HTTP, "features"},
        "tgi": {*_HTTP, "features", "management"},
        "capture": {*_HTTP, "features", "storage"},
        "canary": {*_HTTP, "access", "features", "management", "observability"},
        "vllm_calls": {*_HTTP, "access", "features", "management"},
        "openapi": {*_HTTP, "management"},
        "console": {*_WATCHED, "features", "management", "relay"},
        "emf": {"features", "observability"},
        "lifecycle": _HTTP,
        "ray": {"observability", "server"},
        "route": {*_WATCHED, "app", "features", "server"},
    },
    "lmi_server.configuration": {
        "model_directory": {"options", "tasks"},
        "model_file": {*_VALUES, "engine", "handlers"},
        "choice": {*_VALUES, "engine", "handlers", "model_directory", "model_file", "properties", "tasks"},
        "checks": {*_VALUES, "choice", "engine", "handlers", "model_directory", "references"},
    },
    "lmi_server.supervisor": {"launch": set[str]()},
    "lmi_server.worker": {
        "answers": set[str](),
        "processors": {"answers", "handler_loading"},
        "services": {"answers", "handler_loading", "memory_limit", "processors"},
    },
    "lmi_server.serving": {
        "adapters": set[str](),
        "dispatch": {"pool_settings", "roster"},
        "pool": {"adapters", "dispatch", "pool_settings", "roster"},
        "models": {"adapters", "pool", "pool_settings"},
    },
    "lmi_server.ray": {
        "deployments": set[str](),
        "actors": {"autoscaling", "messages"},
        "processes": {"messages"},
        "recommendation": {"deployments"},
    },
    "handlers.rolling_batch": {
        "schedule": set[str](),
        "attention": {"device_arrays"},
        "pages": {"attention", "device_arrays", "schedule"},
        "fused": {"attention"},
        "cpu": {"attention", "fused", "options"},
        "images": {"schedule"},
        "lora": {"attention", "cpu", "device_arrays", "engine", "fused", "schedule"},
        "sequences": {"attention"},
        "states": {"attention", "schedule"},
        "runner": {
            "attention",
            "cpu",
            "device_arrays",
            "fused",
            "images",
            "lora",
            "options",
            "pages",
            "schedule",
            "sequences",
            "states",
        },
        "sampling": {"device_arrays"},
        "requests": {"device_arrays", "grammars", "request", "runner", "sampling", "schedule", "speculation"},
        "speculation": {"engine", "options", "runner", "sampling", "schedule"},
    },
}
TABLE = "lmi_server/configuration/handlers.py"
FEATURE_TABLE = "lmi_server/features.py"
COMPOSITION_ROOT = "lmi_server/commands/cli.py"
ENVIRONMENT = "lmi_server/machine/environment.py"
# What a handler may import of lmi_server: the contract, what the machine has, the dialects' pure functions, media, and
# the declarations that its options are made of.
HANDLERS_MAY_IMPORT = (
    "lmi_server.contract",
    "lmi_server.files",
    "lmi_server.machine",
    "lmi_server.processes",
    "lmi_server.dialects",
    "lmi_server.media",
    "lmi_server.configuration.declaration",
    "lmi_server.configuration.engine",
    "lmi_server.configuration.model_directory.gguf",  # reads headers, of which it knows what a file may say
    "lmi_server.configuration.options",
    "lmi_server.configuration.references",
    "lmi_server.configuration.tasks",
)
# Folders and modules of handlers/ that several handlers share.
SHARED = {
    "abandoned_work",
    "batch_messages",
    "chats",
    "checkpoints",
    "content",
    "cpu_kernels",
    "generation",
    "logits",
    "neuron_failures",
    "ranks",
    "rolling_batch",
    "request_groups",
    "step_loop",
    "structured_output",
    "tasks",
    "torch_operators",
    "user_code",
    "user_modules",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder_of(module: str) -> str:
    """Return the folder or module right below the package: "contract" of lmi_server.contract.link."""
    return module.split(".")[1] if "." in module else ""


def imports_its_engine(path: Path) -> bool:
    """Return whether a handler imports the module only when it loads, so that the module may import the engine."""
    in_folder = path.parent.parent.name == "handlers" or path.parent.parent.parent.name == "handlers"
    return in_folder and not path.stem.endswith(("handler", "options", "__init__"))


BY_NAME = {name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in MODULES}


def imported(nodes: Iterable[ast.AST], module: Path) -> Iterator[str]:
    """Yield each module that nodes import, in full; of `from a import b` that is `a.b` if b is a module of ours."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(module)}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in BY_NAME else node.module


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return what `ast.walk` yields of a module: to walk again would take most of the time of these tests."""
    return tuple(ast.walk(parsed(path)))


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(imported(nodes_of(path), path))


def top_of(name: str) -> str:
    return name.partition(".")[0]


def test_every_folder_says_what_it_is() -> None:
    folders = [path for path in MODULES if path.name == "__init__.py" and "compat" not in path.parts]
    silent = [name_of(path) for path in folders if len(ast.get_docstring(parsed(path)) or "") < 20]
    assert not silent, "an __init__ says what lives in its folder"


def test_imports_of_lmi_server_point_one_way() -> None:
    wrong = []
    for name, path in BY_NAME.items():
        if top_of(name) != "lmi_server" or name == "lmi_server" or folder_of(name) == "compat":
            continue
        for other in imports_of(path):
            if top_of(other) == "frontend" and name_of(path) == COMPOSITION_ROOT:
                continue
            allowed = folder_of(other) in {folder_of(name), *MAY_IMPORT[folder_of(name)]}
            if top_of(other) in PACKAGES and not (top_of(other) == "lmi_server" and allowed):
                wrong.append(f"{name_of(path)} imports {other}")
    assert not wrong


@pytest.mark.parametrize("package", INSIDE_MAY_IMPORT)
def test_imports_between_the_folders_of_a_package_point_one_way(package: str) -> None:
    """Each folder has an entry of its own in the table."""
    allowed = INSIDE_MAY_IMPORT[package]
    below = f"{package}."
    assert {path.parent.name for path in (ROOT / package.replace(".", "/")).glob("*/__init__.py")} == set(allowed)
    wrong = []
    for name, path in BY_NAME.items():
        folder = name.removeprefix(below).partition(".")[0]
        if not name.startswith(below) or folder not in allowed:
            continue
        for other in imports_of(path):
            part = other.removeprefix(below).partition(".")[0]
            if other.startswith(below) and part not in {folder, *allowed[folder]}:
                wrong.append(f"{name_of(path)} imports {other}")
    assert not wrong


def test_the_front_end_knows_no_handler_and_no_worker() -> None:
    wrong = [
        f"{name_of(path)} imports {other}"
        for name, path in BY_NAME.items()
        if top_of(name) == "frontend"
        for other in imports_of(path)
        if top_of(other) == "handlers" or other.startswith("lmi_server.worker")
    ]
    assert not wrong


def test_handlers_import_types_and_no_other_handler() -> None:
    wrong = []
    for name, path in BY_NAME.items():
        if top_of(name) != "handlers" or name == "handlers":
            continue
        may = {folder_of(name), *SHARED}
        for other in imports_of(path):
            own = top_of(other) == "handlers" and folder_of(other) in may
            if top_of(other) in PACKAGES and not own and not other.startswith(HANDLERS_MAY_IMPORT):
                wrong.append(f"{name_of(path)} imports {other}")
    assert not wrong


def compared(path: Path) -> Iterator[object]:
    """Yield the constants that code is compared with."""
    for node in nodes_of(path):
        if isinstance(node, ast.Compare | ast.MatchValue):
            yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))


def test_a_handler_is_its_folder_and_its_row_in_the_table() -> None:
    """No other code asks which handler it is, and only the table names the modules of one."""
    folders = {folder_of(spec.options.partition(":")[0]) for spec in HANDLERS}
    names = {*folders, *HANDLERS.entry_points(), *(spec.title for spec in HANDLERS)}
    wrong = []
    for name, path in BY_NAME.items():
        if top_of(name) == "handlers" or folder_of(name) == "compat" or name_of(path) == TABLE:
            continue
        texts = [node.value for node in nodes_of(path) if isinstance(node, ast.Constant)]
        modules = [text for text in texts if isinstance(text, str) and text.startswith("handlers.")]
        asked = [value for value in compared(path) if value in names]
        wrong += [f"{name_of(path)} names {text}" for text in (*modules, *asked)]
    assert not wrong


def test_a_feature_is_its_modules_and_its_entry() -> None:
    """No other module imports those of a feature, and only the table names them."""
    wrong = []
    for name, path in BY_NAME.items():
        own = feature_of(name)
        for other in imports_of(path):
            feature = feature_of(other)
            if feature not in (None, own, *BUILT_ON.get(own or "", ())):
                wrong.append(f"{name_of(path)} imports {other}")
        if name_of(path) == FEATURE_TABLE:
            continue
        for node in nodes_of(path):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            feature = feature_of(text.partition(":")[0])
            if feature not in (None, own):
                wrong.append(f"{name_of(path)} names {text}")
    assert not wrong


def test_no_engine_is_imported_when_a_module_is() -> None:
    wrong = {
        name_of(path): sorted(engines)
        for path in MODULES
        if not imports_its_engine(path) and (engines := {top_of(name) for name in reached(path)} & ENGINES)
    }
    assert not wrong


@functools.cache
def reached(start: Path) -> frozenset[str]:
    """Return every module that importing `start` imports, directly or through modules of ours."""
    direct = at_import(start)
    below = {BY_NAME[name] for name in direct & BY_NAME.keys()} - {start}
    return direct.union(*map(reached, below))


def test_one_module_reads_the_environment() -> None:
    reads = {"environ", "environb", "getenv"}
    wrong = [
        f"{name_of(path)}:{node.lineno}: use process_environment()"
        for path in MODULES
        if name_of(path) != ENVIRONMENT
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in reads
    ]
    assert not wrong


def test_no_module_is_imported_in_a_circle() -> None:
    graph = {name: at_import(path) & BY_NAME.keys() - {name} for name, path in BY_NAME.items()}
    while free := [name for name, needs in graph.items() if not needs]:
        graph = {name: needs - set(free) for name, needs in graph.items() if name not in free}
    assert not graph, f"import circle among {sorted(graph)}"


@functools.cache
def at_import(path: Path) -> frozenset[str]:
    """Return what the module imports when it is imported itself, not when a function of it runs."""
    nodes = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return frozenset(name for node in nodes for name in imported((node,), path))

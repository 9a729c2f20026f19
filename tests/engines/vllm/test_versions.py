"""The contract of the vllm handler with vLLM, in the source of each version that is here: see scripts/vllm_versions.py.

Without that script there is one version, the one that the other tests run with.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT

from handlers.vllm import interface
from handlers.vllm.interface import check_version, lacking
from lmi_server.contract.errors import ModelLoadError

OURS = ROOT / "handlers" / "vllm"
DIFFERENCES = "differences.py"


def versions() -> dict[str, Path]:
    """Return the folder of each vLLM that is here by what it is called: that of this environment, and those beside."""
    found = {path.parts[-5]: path for path in (ROOT / ".venv" / "vllm").glob("*/lib/python3*/site-packages/vllm")}
    spec = find_spec("vllm")
    own = {} if spec is None or spec.origin is None else {"installed": Path(spec.origin).parent}
    return found | own


VERSIONS = versions()
of_each_version = pytest.mark.parametrize("folder", VERSIONS.values(), ids=VERSIONS.keys())
pytestmark = pytest.mark.skipif(not VERSIONS, reason="vLLM is not installed")


def module_of(folder: Path, name: str) -> Path | None:
    """Return the file of a module of vLLM; None if there is none."""
    stem = folder.parent / name.replace(".", "/")
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@functools.cache
def parsed(path: Path | None) -> ast.Module:
    return ast.Module([], []) if path is None else ast.parse(path.read_text(encoding="utf-8"))


def has_name(folder: Path, module: str, name: str) -> bool:
    """Return whether a module binds a name, anywhere at its top or in a branch there; or has a module of that name."""
    names = set()
    for node in ast.walk(parsed(module_of(folder, module))):
        match node:
            case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound) | ast.Name(id=bound, ctx=ast.Store()):
                names.add(bound)
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in node.names}
    return name in names or module_of(folder, f"{module}.{name}") is not None


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what a file of ours imports from vLLM, as module and name."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)


@of_each_version
def test_every_imported_name_is_there(folder: Path) -> None:
    files = [path for path in OURS.rglob("*.py") if path.name != DIFFERENCES]
    wanted = sorted({found for path in files for found in imports(path)})
    assert len(wanted) > 30, "the imports were not found"
    assert not [found for found in wanted if not has_name(folder, *found)]


@of_each_version
def test_a_name_that_has_moved_is_at_one_of_its_places(folder: Path) -> None:
    places: dict[str, list[str]] = {}
    for module, name in imports(OURS / DIFFERENCES):
        places.setdefault(name, []).append(module)
    assert len(places["make_tool_call_id"]) == 2
    for name, modules in places.items():
        assert any(has_name(folder, module, name) for module in modules), name


@of_each_version
def test_every_member_that_is_used_is_there(folder: Path) -> None:
    assert list(lacking(lambda file: parsed(folder / file if (folder / file).is_file() else None))) == []


@of_each_version
def test_each_difference_is_needed_or_gone(folder: Path) -> None:
    """A version has what `differences.py` asks for as the newest form, or what it falls back to."""
    renderer = (folder / "renderers" / "online_renderer.py").read_text(encoding="utf-8")
    base = (folder / "renderers" / "base.py").read_text(encoding="utf-8")
    assert "def effective_chat_template_kwargs" in renderer or "self.default_chat_template_kwargs" in renderer
    assert "def validate_token_ids" in base or "self.model_config" in base


@pytest.mark.slow
def test_a_pooled_output_of_0_31_has_no_error() -> None:
    from handlers.vllm.differences import failure_of

    assert failure_of(SimpleNamespace(finished=True)) is None
    assert failure_of(SimpleNamespace(error=None)) is None
    assert failure_of(SimpleNamespace(error=SimpleNamespace(message="no result"))) == "no result"


def test_a_version_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"outputs.RequestOutput": "finished ended_at", "outputs.Gone": "text"}
    used |= {"v1.engine.llm_engine.LLMEngine": "add_request(priority haste)"}
    missing = [
        "vllm.outputs.RequestOutput.ended_at",
        "vllm.outputs.Gone",
        "vllm.v1.engine.llm_engine.LLMEngine.add_request(haste=)",
    ]
    assert list(lacking(used=used)) == missing
    monkeypatch.setattr(interface, "lacking", lambda: iter(missing))
    with pytest.raises(ModelLoadError) as caught:
        check_version("0.99.1")
    assert caught.value.message.startswith(f"vLLM 0.99.1 lacks what this handler uses: {', '.join(missing)}; install")
    assert "option.engine_version=0.33.0" in caught.value.message


def test_a_version_that_nobody_has_tested_and_that_has_everything_is_worth_a_warning() -> None:
    assert check_version("0.32.0") is None
    assert check_version("0.31.2rc1") is None
    assert "tested with 0.31 to 0.33" in (check_version("0.310.0") or "")

"""torch's compiler is imported late: what is asked of it before counts, and everything else finds it as it is."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmi_server.processes.late_compiler import import_late

_CODE = """
import time
from late_package import config
from late_package.decorators import allow_in_graph, assume_constant_result, disable
time.sleep({pause})
names = ["config"]
__all__ = ["names", "disable"]
"""
_DECORATORS = """
allowed, constant, disabled = [], [], []
def allow_in_graph(function):
    allowed.append(function)
    return function
def assume_constant_result(function):
    constant.append(function)
    return function
def disable(function=None, recursive=True, *, reason=None):
    if function is None:
        return lambda decorated: disable(decorated, recursive, reason=reason)
    disabled.append((function, recursive, reason))
    return lambda *values: ("disabled", function(*values))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that stands for the compiler, imported late."""
    directory = tmp_path / "late_package"
    directory.mkdir()
    (directory / "__init__.py").write_text(_CODE.format(pause=0.05))
    (directory / "decorators.py").write_text(_DECORATORS)
    (directory / "config.py").write_text("imports = []\n")
    (directory / "other.py").write_text("from late_package import config\nconfig.imports.append(__name__)\n")
    (directory / "alone.py").write_text("class Mode: pass\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    import_late("late_package", "alone")
    yield importlib.import_module("late_package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "late_package"]:
        del sys.modules[name]


def has_run(package: ModuleType) -> bool:
    return type(package) is ModuleType


def double(number: int) -> int:
    return 2 * number


def test_decorators_do_not_run_the_code(package: Any) -> None:
    assert package.allow_in_graph(double) is double
    assert package.assume_constant_result(double) is double
    assert package.disable(double)(2) == package.disable(recursive=False)(double)(2) == 4
    assert package.disable(double).__name__ == "double"
    assert not has_run(package)


def test_what_was_decorated_before_is_decorated_once_the_code_runs(package: Any) -> None:
    package.allow_in_graph(double)
    package.assume_constant_result(double)
    calls = [package.disable(double), package.disable(recursive=False, reason="why")(double)]
    assert package.names == ["config"]
    decorators = package.decorators
    assert (decorators.allowed, decorators.constant) == ([double], [double])
    assert decorators.disabled == [(double, True, None), (double, False, "why")]
    assert [call(2) for call in calls] == [("disabled", 4), ("disabled", 4)]
    assert package.disable is decorators.disable


def test_what_is_no_function_is_left_to_the_code(package: Any) -> None:
    assert package.disable(len)([1]) == ("disabled", 1)
    assert has_run(package)


def test_a_module_that_needs_nothing_of_the_package_is_imported_alone(package: ModuleType) -> None:
    from late_package.alone import Mode

    assert Mode.__module__ == "late_package.alone"
    assert not has_run(package)


def test_a_module_is_imported_once_after_the_code_of_its_package(package: Any) -> None:
    config = importlib.import_module("late_package.config")
    assert has_run(package)
    assert config is package.config
    assert importlib.import_module("late_package.other").config is config
    assert config.imports == ["late_package.other"]


def test_all_names_can_be_imported(package: ModuleType) -> None:
    names: dict[str, object] = {}
    exec("from late_package import *", names)
    assert names["names"] == ["config"]


def test_a_name_that_it_does_not_have_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = package.missing


def test_two_threads_that_use_it_first_both_find_it(package: Any) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(package.names)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["config"]] * 4


def test_code_that_fails_is_run_again_by_the_next_use(package: Any, tmp_path: Path) -> None:
    decorators = tmp_path / "late_package" / "decorators.py"
    decorators.unlink()
    with pytest.raises(ImportError):
        _ = package.names
    decorators.write_text(_DECORATORS)
    importlib.invalidate_caches()
    assert package.names == ["config"]


def test_a_package_that_is_imported_already_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finders = list(sys.meta_path)
    import_late("json", "decoder")
    assert sys.meta_path == finders


_IMPORTS = """
import sys
from lmi_server.processes import model_imports
model_imports.prepare()
with model_imports.importing():
    import handlers.rolling_batch.engine_loading
    import torch
    from transformers.masking_utils import TransformGetItemToIndex
assert "torch._dynamo" in sys.modules and "torch._dynamo.decorators" not in sys.modules
torch.empty(2, device="meta").normal_()
assert "torch._dynamo.decorators" not in sys.modules

seen = []
apart = torch.compiler.disable(lambda value: seen.append(torch.compiler.is_compiling()) or value + 1)
assert apart(1) == 2 and seen.pop() is False
compiled = torch.compile(lambda value: apart(2 * value) * 3, backend="eager")
assert compiled(torch.ones(2)).tolist() == [9, 9] and seen == [False]
from torch._dynamo import config
assert config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
print("compiled")
"""


@pytest.mark.slow
def test_a_model_loads_without_the_compiler_and_code_that_compiles_finds_it() -> None:
    run = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "compiled\n"), run.stderr

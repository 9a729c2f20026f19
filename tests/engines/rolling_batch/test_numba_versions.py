"""Kernels do without numba's private layer if a numba has another one."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core import registry

from handlers.cpu_kernels.compilation import kernel_cache, part_compiler, private_layer

# Part and kernel of its own, compiled without what is missing.
COMPUTES = """
import sys
{change}
import numpy as np
from handlers.cpu_kernels import rows
from handlers.cpu_kernels.compilation import decorators

values = np.arange(64, dtype=np.float32).reshape(2, 32)
found = np.empty(2, np.int64)
rows.argmax_rows(values, found, found)
print(decorators.IS_KEPT, "pipeline_class" in decorators.PART, found.tolist())
"""


@pytest.mark.parametrize(
    ("version", "tested"),
    [((0, 62), False), ((0, 63), True), ((0, 65), True), ((0, 68), True), ((0, 69), False), ((1, 0), False)],
)
def test_the_range_is_that_of_setup_cfg(version: tuple[int, int], tested: bool) -> None:
    assert private_layer._is_tested(version) is tested
    (first, last), lines = private_layer.TESTED, Path("setup.cfg").read_text(encoding="utf-8")
    assert f"numba>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}\n" in lines


def test_an_untested_numba_compiles_a_part_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_layer, "TESTED", ((0, 1), (0, 2)))
    found = private_layer.pipelines()
    assert found.of_parts["pipeline_class"] is part_compiler.PartCompiler
    assert found.of_kernels["pipeline_class"] is part_compiler.KernelCompiler


def raises(*_: Any, **__: Any) -> Any:
    raise TypeError("takes 2 positional arguments\nbut 3 were given")


def test_another_pipeline_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(private_layer, "TESTED", ((0, 1), (0, 2)))
    monkeypatch.setattr(part_compiler.PartCompiler, "define_pipelines", raises)
    with caplog.at_level(logging.WARNING):
        found = private_layer.pipelines()
    assert "tested (0.1 to 0.2)" in caplog.text
    assert "TypeError: takes 2" in caplog.text

    @njit(**found.of_parts)  # type: ignore[untyped-decorator]
    def part(values: Any) -> Any:
        return values.sum()

    @njit(**found.of_kernels)  # type: ignore[untyped-decorator]
    def whole(values: Any) -> Any:
        return part(values) + 1

    assert found == ({}, {}, {})
    assert whole(np.arange(4)) == 7


def test_the_target_is_known_without_numbas_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = private_layer.target()
    monkeypatch.setattr(registry, "cpu_target", None)
    kind, name, features = private_layer.target()
    assert (kind, name) == expected[:2]
    assert features


def test_no_place_is_known_without_numbas_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "KernelCache", raises)
    assert private_layer.find_place(tmp_path) is False


def test_no_place_is_known_if_numba_does_not_ask_our_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_cache, "keep", lambda kernel: None)
    assert private_layer.find_place(tmp_path) is False
    assert "each start compiles its kernels anew" in caplog.text


@pytest.mark.slow
def test_kernels_compute_without_the_modules() -> None:
    names = ("numba.core.caching", "handlers.cpu_kernels.compilation.part_compiler")
    # numba itself imports its cache: only ours is to miss it.
    change = f"import numba.core.caching as caching; del caching.InTreeCacheLocator; sys.modules[{names[1]!r}] = None"
    code = COMPUTES.format(change=change)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert ran.stdout.split("\n")[0] == "False False [31, 31]", ran.stderr
    assert "each start compiles its kernels anew" in ran.stderr
    assert "compiled several times" in ran.stderr

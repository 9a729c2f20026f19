"""Where compiled kernels are kept if numba cannot write where it would: beside temporary files, or nowhere.

Each case is a process of its own, which compiles two small kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

CODE = """
import logging
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
import numpy as np
from handlers.cpu_kernels.rows import mask_rows
from handlers.cpu_kernels.threads.parallel import wake_helpers
from handlers.rolling_batch.cpu.first_compilation import compiled_kernels, compiled_marker
mask_rows(np.zeros((1, 32), "float32"), np.zeros(1, "int64"), np.zeros((1, 1), "uint32"))
wake_helpers()
hits = [sum(kernel.stats.cache_hits.values()) for kernel in (mask_rows, wake_helpers)]
assert hits[0] == hits[1], hits  # a kernel of a folder below is found wherever one beside it is
print(hits[0], compiled_kernels(), compiled_marker("float32", "plain", "float32"))
"""


# Otherwise root writes everywhere.
AS_USER = ["setpriv", "--bounding-set", "-dac_override"] if os.getuid() == 0 else []


def ran(directory: Path, temporary: Path) -> tuple[int, str, str]:
    """Compile two kernels; numba looks for them below `directory` only. Return the hits, the folder, the log."""
    done = subprocess.run(
        [*AS_USER, sys.executable, "-c", CODE],
        cwd=ROOT,
        env={
            **os.environ,
            "NUMBA_CACHE_DIR": str(directory),
            "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
            "TMPDIR": str(temporary),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hits, kept, _ = done.stdout.split()
    return int(hits), kept, done.stderr


def sealed(directory: Path) -> Path:
    """Make a directory that cannot be written."""
    folder = directory / "sealed"
    folder.mkdir(mode=0o555, exist_ok=True)
    return folder


@pytest.mark.slow
def test_kernels_of_a_place_that_cannot_be_written_are_copied_and_used(tmp_path: Path) -> None:
    temporary, filled = tmp_path / "tmp", tmp_path / "filled"
    temporary.mkdir()
    hits, kept, log = ran(filled, temporary)
    assert (hits, Path(kept).parent, list(temporary.iterdir()), log) == (0, filled, [], "")
    for path in (*filled.rglob("*"), filled):
        path.chmod(0o555 if path.is_dir() else 0o444)
    hits, kept, log = ran(filled, temporary)
    own = next(temporary.iterdir())
    assert (hits, Path(kept).parent, own.stat().st_mode & 0o777) == (1, own, 0o700)
    assert f"INFO Compiled kernels are kept in {own} with those of {filled}" in log


@pytest.mark.slow
def test_without_compiled_kernels_they_are_compiled_into_the_temporary_directory(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    first, again = (ran(sealed(tmp_path), temporary) for _ in range(2))
    assert (first[0], again[0]) == (0, 1)
    assert Path(first[1]).is_relative_to(temporary)


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["a file", "a folder of others"])
def test_without_any_place_they_are_compiled_anew(tmp_path: Path, obstacle: str) -> None:
    """A folder that others can write is no place: numba runs the code that it finds there."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    own = temporary / f"lmi-server-kernels-{os.getuid()}"
    if obstacle == "a file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777)
    hits, kept, log = ran(sealed(tmp_path), temporary)
    assert (hits, kept) == (0, "None")
    assert "WARNING compiled kernels cannot be kept" in log
    assert "NUMBA_CACHE_DIR" in log
    assert own.is_file() or not list(own.iterdir())


@pytest.mark.slow
def test_kernels_for_other_processors_have_names_of_their_own() -> None:
    """Machines that share a folder do not write each other's files."""
    code = "from handlers.cpu_kernels.rows import rotate; print(rotate.py_func.__qualname__)"
    environments = (os.environ, os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""})
    names = [subprocess.check_output([sys.executable, "-c", code], env=each, cwd=ROOT) for each in environments]
    assert names[0] != names[1]

"""What a process does first that another one spawns."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import SpawnContext

import pytest

from lmi_server.processes import spawned

CODE = """
import multiprocessing, sys

def is_prepared():
    return type(sys.meta_path[0]).__name__ == "_LateImportFinder"

if {nested} and is_prepared():
    inner = multiprocessing.get_context("spawn").Process(target=exec, args=({inner!r},))
    inner.start()
    inner.join()
    sys.exit(inner.exitcode)
sys.exit(7 if is_prepared() else 1)
"""


@pytest.mark.parametrize("prepared", [True, False])
def test_it_and_what_it_spawns_import_libraries_as_a_worker_does(
    prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpawnContext, "Process", SpawnContext.Process)
    if prepared:
        spawned.prepare_imports()
    code = CODE.format(nested=True, inner=CODE.format(nested=False, inner=""))
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
    process.start()
    process.join()
    assert process.exitcode == (7 if prepared else 1)

"""What model_imports changes around the imports of a worker, and that models notice nothing of it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.devices import NVIDIA
from lmi_server.processes import model_imports


@pytest.fixture(autouse=True)
def usual_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_the_garbage_collector_works_as_usual_once_a_model_is_loaded() -> None:
    usual = model_imports._SERVING
    model_imports.prepare()
    assert gc.get_threshold() > usual
    model_imports.finish_loading()
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() > 0


def test_a_collection_during_the_load_leaves_out_what_was_imported_before() -> None:
    libraries = [[] for _ in range(1000)]
    model_imports.freeze_libraries()
    assert not any(found is libraries for found in gc.get_objects())


def test_the_thresholds_that_a_model_sets_stay() -> None:
    model_imports.prepare()
    gc.set_threshold(5000, 5, 5)
    model_imports.finish_loading()
    assert gc.get_threshold() == (5000, 5, 5)


def test_a_hidden_library_is_not_found_meanwhile() -> None:
    with model_imports.hide("wave"), pytest.raises(ImportError):
        import wave
    import wave

    with model_imports.hide("wave"):
        import wave as again
    assert again is wave


@pytest.mark.parametrize(("gpus", "hides"), [((), True), ((Gpu("0"),), False)])
def test_triton_is_hidden_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], hides: bool
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(model_imports, "shown_gpus", lambda _: (NVIDIA, gpus))
    with model_imports.hide_triton():
        assert ("triton" in sys.modules) is hides
    assert "triton" not in sys.modules

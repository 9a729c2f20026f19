"""What model_imports changes around the imports of a worker, and that models notice nothing of it."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.mark.slow
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


def test_no_collection_looks_at_what_libraries_make(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [[] for _ in range(1000)]
    assert any(found is made for found in gc.get_objects())
    with model_imports.importing():
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, "a_library", sys)
    assert gc.isenabled()
    assert not any(found is made for found in gc.get_objects())


def test_garbage_is_collected_where_all_was_imported_before() -> None:
    garbage: list[object] = [[]]
    garbage.append(garbage)
    with pytest.raises(ImportError), model_imports.importing():
        raise ImportError
    assert any(found is garbage for found in gc.get_objects())
    assert gc.isenabled()


@pytest.mark.slow
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


@pytest.mark.slow
def test_speculative_decoding_finds_scikit_learn_when_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from tiny_models import tiny_model
    from transformers.generation import candidate_generator

    asked = []
    monkeypatch.setattr(
        candidate_generator,
        "roc_curve",
        lambda *arguments, original=candidate_generator.roc_curve: asked.append(original(*arguments)) or asked[-1],
    )
    model, assistant = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight), alpha=0.02)
    assistant.generation_config.assistant_confidence_threshold = 0.001
    prompt = torch.tensor([[79, 110, 99, 101]])
    wanted = model.generate(prompt, max_new_tokens=40, do_sample=False)
    assert model.generate(prompt, assistant_model=assistant, max_new_tokens=40, do_sample=False).equal(wanted)
    assert asked


@pytest.mark.slow
def test_the_loss_of_object_detection_finds_scipy_when_it_needs_it() -> None:
    from transformers.loss import loss_deformable_detr, loss_for_object_detection, loss_rt_detr

    for module in (loss_deformable_detr, loss_for_object_detection, loss_rt_detr):  # they import each other
        assert module.is_scipy_available()
        rows, columns = module.linear_sum_assignment([[2.0, 1.0], [1.0, 2.0]])
        assert (rows.tolist(), columns.tolist()) == ([0, 1], [1, 0])


@pytest.mark.slow
def test_accelerate_finds_boto3_when_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "boto3", raising=False)
    spec = importlib.util.find_spec("accelerate.commands.config.sagemaker")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "boto3" not in sys.modules
    assert callable(module.boto3.client)
    assert "boto3" in sys.modules


@pytest.mark.slow
def test_bitsandbytes_compiles_when_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked: list[dict[str, object]] = []

    def compile_recorded(function: Callable[..., object], **options: object) -> Callable[..., object]:
        asked.append(options)
        return function

    name = "bitsandbytes.backends.default.ops"
    spec = importlib.util.find_spec(name)
    monkeypatch.setattr(torch, "compile", compile_recorded)
    monkeypatch.setattr(sys.modules["bitsandbytes._ops"], "register_kernel", lambda *_: lambda function: function)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (torch.compile, asked) == (compile_recorded, [])
    packed, code = torch.arange(8, dtype=torch.uint8), torch.arange(256, dtype=torch.float32)
    for _ in range(2):
        found = module._dequantize_blockwise_compute(packed, torch.tensor([2.0, 3.0]), code, 4, torch.float32)
        assert found.tolist() == [0, 2, 4, 6, 12, 15, 18, 21]
    assert asked == [{"dynamic": False}]


def test_the_installed_packages_are_those_that_python_finds() -> None:
    found, usual = model_imports.packages_distributions(), importlib.metadata.packages_distributions()
    assert {name: sorted(found[name]) for name in found} == {name: sorted(usual[name]) for name in usual}


@pytest.mark.slow
def test_transformers_finds_its_modules_as_it_does_by_itself() -> None:
    from transformers.utils import import_utils as ours

    spec = importlib.util.find_spec(ours.__name__)
    assert isinstance(spec.loader, model_imports.ScanningLoader)
    usual = importlib.util.module_from_spec(importlib.util.spec_from_file_location(ours.__name__, spec.origin))
    usual.__spec__.loader.exec_module(usual)
    models = Path(ours.__file__).parent.parent / "models"
    assert ours.define_import_structure(models) == usual.define_import_structure(models)
    # Not what transformers itself found: the import path may have grown since.
    assert model_imports.packages_distributions().keys() == usual.PACKAGE_DISTRIBUTION_MAPPING.keys()

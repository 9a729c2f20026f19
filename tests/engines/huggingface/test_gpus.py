"""What a load decides by the GPUs of a worker: whether torch can use them, data type, placement, and the rank's GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import GIB, FakeCuda
from tiny_models import saved_model, tiny_model
from transformers import AutoConfig
from typer.testing import CliRunner

from handlers.checkpoints import transformers_loading
from handlers.checkpoints.gpus import TorchGpus, gpu_fault, own_gpu, usable_gpus
from handlers.checkpoints.options import TransformersOptions
from handlers.checkpoints.quantization import rounds_activations
from lmi_server.commands.cli import app
from lmi_server.contract.errors import ModelLoadError, ModelMemoryError
from lmi_server.contract.ranks import Rank

BUILD = "torch 2.13.0 for CUDA 13.0"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."
WORKING = TorchGpus(BUILD, True, 2, "", [(9, 0), (7, 5)], [(7, 5), (8, 0)])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in bfloat16."""
    return saved_model(tiny_model("llama").to(torch.bfloat16), tmp_path_factory.mktemp("weights"))


def arguments(weights: Path, options: Any = None, **more: Any) -> dict[str, Any]:
    return transformers_loading.model_arguments(str(weights), TransformersOptions(**(options or {})), **more)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (
            TorchGpus("torch 2.13.0+cpu", False),
            "torch 2.13.0+cpu is built for CPUs; install the build of torch for GPUs",
        ),
        (TorchGpus(BUILD, True, 2, OLD_DRIVER), f"{BUILD} cannot use them: {OLD_DRIVER}; update the driver"),
        (TorchGpus(BUILD, True, 1), f"{BUILD} sees 1; look at what nvidia-smi says"),
        (TorchGpus(BUILD, True, 2, "", [(7, 0)] * 2, [(7, 5)]), "of compute capability 7.0, and "),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_fault_with_a_remedy(found: TorchGpus, fault: str) -> None:
    text = gpu_fault(["0", "1"], "CUDA_VISIBLE_DEVICES", found)
    assert text is not None
    assert text.startswith("this worker has 2 GPUs (CUDA_VISIBLE_DEVICES=0,1)")
    assert text.endswith("or set load_on_devices=cpu")
    assert fault in text


def test_no_fault_without_gpus_or_if_torch_can_use_them() -> None:
    assert gpu_fault([], "CUDA_VISIBLE_DEVICES", TorchGpus("torch 2.13.0+cpu", False)) is None
    assert gpu_fault(["0", "1"], "CUDA_VISIBLE_DEVICES", WORKING) is None


def test_torch_says_why_it_cannot_use_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(failure=OLD_DRIVER).install(monkeypatch)
    found = usable_gpus()  # this machine has none, so that nothing is missing
    assert found.count == 0
    assert found.failure == f"RuntimeError: {OLD_DRIVER}"


@pytest.mark.parametrize(
    ("capability", "options", "dtype"),
    [
        ((9, 0), {}, "auto"),
        ((7, 5), {}, torch.float16),
        ((7, 5), {"dtype": "fp32"}, torch.float32),
        ((7, 5), {"dtype": "bf16"}, torch.bfloat16),
        ((7, 5), {"device_map": "cpu"}, "auto"),
    ],
)
def test_a_checkpoint_in_bf16_is_fp16_on_gpus_that_have_no_bf16(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    weights: Path,
    capability: tuple[int, int],
    options: dict[str, Any],
    dtype: Any,
) -> None:
    FakeCuda(capability=capability).install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert arguments(weights, options)["dtype"] == dtype
    warned = capability < (8, 0) and "device_map" not in options and options.get("dtype") != "fp32"
    assert ("older than compute capability 8.0" in caplog.text) is warned


def test_the_placement_follows_the_gpus_of_the_worker(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    assert "device_map" not in arguments(weights)
    FakeCuda().install(monkeypatch)
    assert arguments(weights)["device_map"] == "cuda"
    FakeCuda(memory=[(10 * GIB, 16 * GIB)] * 2).install(monkeypatch)
    spread = arguments(weights)
    assert spread["device_map"] == "auto"
    assert spread["max_memory"][1] == 8 * GIB
    # A rank of a group has one GPU, and transformers places its part: nothing may measure the others.
    assert "max_memory" not in arguments(weights, device_map=None)
    assert "max_memory" not in arguments(weights, {"device_map": "cuda:1"})


def test_a_rank_of_a_group_loads_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    cuda = FakeCuda(memory=[(GIB, GIB)] * 2).install(monkeypatch)
    assert own_gpu(Rank(1, 2, "")) == cuda.current == torch.device("cuda", 1)
    with pytest.raises(ModelLoadError, match=r"option.tensor_parallel_degree=4, and torch sees 2 GPUs.*lower it to 2"):
        own_gpu(Rank(3, 4, ""))
    for name, value in {"LMI_RANK_GROUP": "/nowhere", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert arguments(weights)["device_map"] == "cuda:1"


class FullGpu:
    """A loader that fails as transformers does on a GPU without room."""

    @staticmethod
    def from_pretrained(path: str, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total of 15 GiB")


def test_weights_that_do_not_fit_are_a_lack_of_memory_with_remedies(weights: Path) -> None:
    with pytest.raises(ModelMemoryError, match=r"does not fit into memory .*896.00 MiB.*set option.quantize="):
        transformers_loading.from_pretrained(FullGpu, str(weights))
    assert transformers_loading.from_pretrained(AutoConfig, str(weights)).model_type == "llama"


class Linear8bitLt(torch.nn.Linear):
    """Stands for the layer of bitsandbytes of that name, which on a GPU rounds its inputs to 8 bits."""


def test_layers_of_8_bits_on_a_gpu_are_judged_as_rounded() -> None:
    """Equal logits cannot be asked of them: the load check would refuse every such model."""
    model = tiny_model("llama")
    assert not rounds_activations(model)
    model.model.layers[0].mlp.up_proj = Linear8bitLt(64, 96)
    assert rounds_activations(model)


def devices(directory: Path, **variables: str) -> tuple[int, str]:
    """Return what `lmi-server devices` answers if `directory` alone has the tools of vendors."""
    result = CliRunner().invoke(app, ["devices"], env={"PATH": str(directory), **variables})
    return result.exit_code, result.output


def test_devices_shows_each_gpu_with_what_a_load_would_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeCuda(capability=(7, 5)).install(monkeypatch)
    code, output = devices(tmp_path)
    assert code == 0
    assert f"torch {torch.__version__} for CUDA 12.8" in output
    chosen = "Fake GPU, compute capability 7.5, 14.0 of 16.0 GiB free; checkpoints in bf16 are loaded as fp16"
    assert f"cuda:0: {chosen}" in output


def test_devices_fails_with_the_remedy_if_torch_cannot_use_a_gpu(tmp_path: Path) -> None:
    """amd-smi is a script here, which prints what the real one does for one GPU."""
    tool = tmp_path / "amd-smi"
    usage = '{"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 283, "unit": "MB"}}'
    tool.write_text(f"""#!/bin/sh\necho '[{{"gpu": 0, "mem_usage": {usage}}}]'\n""")
    tool.chmod(0o755)
    code, output = devices(tmp_path)
    assert code == 2
    assert "GPU 0: 191.7 GiB free, 192.0 GiB in all" in output
    assert "this worker has 1 GPU (HIP_VISIBLE_DEVICES=0), and torch" in output
    built_for_cpus = torch.version.cuda is None
    remedy = "install the build of torch for GPUs" if built_for_cpus else "install a build of torch that fits it"
    assert f"{remedy}, or set load_on_devices=cpu" in output

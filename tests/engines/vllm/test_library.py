"""What library.py and the imports of a worker change in vLLM, without an engine."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handlers.vllm.neuron_options import NeuronVllmOptions

pytestmark = pytest.mark.slow  # imports vLLM


def test_no_process_is_started_to_look_at_the_class_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.model_executor.models import registry

    from handlers.vllm import library

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # nothing is stored there
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["/bin/false"])
    model = registry.ModelRegistry.models["LlamaForCausalLM"]
    with pytest.raises(RuntimeError, match="subprocess"):
        model.inspect_model_cls()
    library.inspect_models_in_this_process()
    assert model.inspect_model_cls().is_text_generation_model


def test_audio_is_resampled_with_scipy_which_is_imported_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_spec("vllm.multimodal.audio")
    assert found is not None
    assert found.loader is not None
    monkeypatch.delitem(sys.modules, "scipy.signal", raising=False)  # another test may have imported it
    audio: Any = module_from_spec(found)
    found.loader.exec_module(audio)
    assert "scipy.signal" not in sys.modules
    assert audio.resample_audio_scipy(np.ones(4), orig_sr=1, target_sr=2).shape == (8,)


def test_vllm_takes_the_arguments_for_neuron() -> None:
    """Its plugin for Neuron, which cannot be had here, reads `additional_config`; the other names are vLLM's own."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    options = NeuronVllmOptions.model_validate(
        {
            "max_model_len": "512",
            "context_length_estimate": "128,256",
            "fuse_qkv": "true",
            "sequence_parallel": "true",
            "speculative_draft_model": "owner/draft",
            "draft_model_tp_size": "2",
        }
    )
    arguments = AsyncEngineArgs(model="owner/name", **options.engine_arguments())
    overrides = {"context_encoding_buckets": [128, 256], "fused_qkv": True, "sequence_parallel_enabled": True}
    assert arguments.additional_config == {"override_neuron_config": overrides}
    assert arguments.max_model_len == 512

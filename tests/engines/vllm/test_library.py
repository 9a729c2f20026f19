"""What library.py changes in vLLM, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

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

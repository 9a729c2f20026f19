"""A fake of optimum.neuron; see the README above it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from static_graphs import Graphs
from transformers import AutoConfig, AutoModelForCausalLM

calls: list[tuple[str, dict[str, Any]]] = []
_FAILURES = {
    "device": "The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged",
    "memory": "nrt_tensor_allocate status=4 message=Allocation Failure",
    "compile": "neuronxcc failed: Error class: CompilerInternalError",
}


def fails() -> str:
    return os.environ.get("FAKE_NEURONX_FAILS", "")


def fail_to_load() -> None:
    """Raise what the real one raises for the failure that is asked for."""
    if fails() in _FAILURES:
        raise RuntimeError(_FAILURES[fails()])


def __getattr__(name: str) -> Any:
    """Import diffusers, which takes seconds, for the classes of its pipelines alone."""
    if not name.startswith("NeuronStableDiffusion"):
        raise AttributeError(name)
    from optimum.neuron.pipelines import pipeline_class

    return pipeline_class(name)


class NxDNeuronConfig:
    """What the compiler is asked for; the parameters that the handler never touches are left out."""

    def __init__(
        self,
        checkpoint_id: str | None = None,
        checkpoint_revision: str | None = None,
        batch_size: int = 1,
        continuous_batching: bool = False,
        sequence_length: int = 128,
        tp_degree: int = 1,
        torch_dtype: Any = torch.bfloat16,
        max_context_length: int | None = None,
        fused_qkv: bool = False,
        target: str | None = None,
        on_device_sampling: bool = False,
    ) -> None:
        self.checkpoint_id, self.checkpoint_revision, self.batch_size = checkpoint_id, checkpoint_revision, batch_size
        self.continuous_batching, self.sequence_length = continuous_batching, sequence_length
        self.tp_degree, self.torch_dtype = tp_degree, torch_dtype
        self.max_context_length = max_context_length or sequence_length
        self.fused_qkv, self.target, self.on_device_sampling = fused_qkv, target, on_device_sampling


class NeuronModelForCausalLM:
    def __init__(self, path: str, config: Any, neuron_config: NxDNeuronConfig) -> None:
        self.config, self.neuron_config = config, neuron_config
        self._path = path
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        self._graphs = Graphs(model, neuron_config.batch_size, neuron_config.sequence_length)

    @classmethod
    def get_neuron_config(
        cls,
        model_name_or_path: str,
        config: Any = None,
        token: Any = None,
        revision: str | None = None,
        instance_type: str | None = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        tensor_parallel_size: int | None = None,
    ) -> NxDNeuronConfig:
        return NxDNeuronConfig(
            batch_size=batch_size or 1,
            continuous_batching=(batch_size or 1) > 1,
            sequence_length=sequence_length or 4096,
            tp_degree=tensor_parallel_size or 2,
            fused_qkv=True,
            target=instance_type or "trn1",
            on_device_sampling=True,
        )

    @classmethod
    def export(
        cls,
        model_id: str,
        neuron_config: NxDNeuronConfig,
        config: Any = None,
        token: Any = None,
        revision: str | None = None,
        load_weights: bool = False,
        *,
        trust_remote_code: bool = False,  # of _export
    ) -> NeuronModelForCausalLM:
        calls.append(("export", {"model_id": model_id, "load_weights": load_weights, **vars(neuron_config)}))
        assert load_weights
        fail_to_load()
        return cls(model_id, config, neuron_config)

    @classmethod
    def from_pretrained(cls, model_id: str) -> NeuronModelForCausalLM:
        calls.append(("from_pretrained", {"model_id": model_id}))
        stored = json.loads((Path(model_id) / "neuron_config.json").read_text())
        path = stored.pop("path")
        return cls(path, AutoConfig.from_pretrained(model_id), NxDNeuronConfig(**stored))

    def save_pretrained(self, save_directory: str) -> None:
        calls.append(("save_pretrained", {"save_directory": save_directory}))
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(save_directory)
        stored = {**vars(self.neuron_config), "torch_dtype": str(self.neuron_config.torch_dtype), "path": self._path}
        (Path(save_directory) / "neuron_config.json").write_text(json.dumps(stored))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
    ) -> torch.Tensor:
        """Compute a prompt padded to the longest one, or a token of every line."""
        if fails() == "core":
            raise RuntimeError("nrt_execute status=1202 message=hardware error")
        assert len(input_ids) == len(position_ids) == len(seq_ids) == len(sampling_params)
        length = input_ids.shape[1]
        if length > 1 and int(position_ids.min()) == 0:
            bucket = self.neuron_config.max_context_length
            padded = torch.nn.functional.pad(input_ids, (0, bucket - length))
            logits = self._graphs.compute(padded, torch.arange(bucket).unsqueeze(0), seq_ids)[:, length - 1 : length]
        else:
            assert len(input_ids) == self.neuron_config.batch_size, "the real one would pad with other lines' tokens"
            logits = self._graphs.compute(input_ids, position_ids, seq_ids)
        return logits.argmax(dim=-1) if self.neuron_config.on_device_sampling else logits

"""NeuronAutoModelForCausalLM, and the model that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from static_graphs import Graphs
from transformers import AutoConfig, AutoModelForCausalLM

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.recorded import fails, record

_TYPES = ("bloom", "code_llama", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt")
_GRAPH = "0123456789abcdef0123.neff"


class NeuronAutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *model_args: Any, **kwargs: Any) -> ForSampling:
        config = AutoConfig.from_pretrained(pretrained_model_name_or_path)
        if config.model_type not in _TYPES:
            raise AssertionError(f"The configuration model type '{config.model_type}' is not supported by Neuron")
        record("from_pretrained", path=str(pretrained_model_name_or_path), **kwargs)
        if not model_args:
            for name in ("revision", "low_cpu_mem_usage", "trust_remote_code"):
                kwargs.pop(name, None)
        return ForSampling(str(pretrained_model_name_or_path), config, *model_args, **kwargs)


class ForSampling:
    """What LlamaForSampling and its like are: graphs for prompts and for decoding, over one KV cache."""

    def __init__(
        self,
        path: str,
        config: Any,
        *,
        n_positions: int | list[int] = 2048,
        batch_size: int = 1,
        amp: str = "f32",
        tp_degree: int = 2,
        context_length_estimate: int | list[int] | None = None,
        context_unroll: int | None = None,
        unroll: int | None = None,
        neuron_config: NeuronConfig | None = None,
        prefixed_length: int = 0,
    ) -> None:
        assert amp in ("f32", "f16", "bf16")
        assert unroll is None or isinstance(unroll, int)
        self.neuron_config = neuron_config or NeuronConfig()
        batching = self.neuron_config.continuous_batching
        most = max(n_positions) if isinstance(n_positions, list) else n_positions
        estimates = context_length_estimate
        if batching is not None:
            assert batching.batch_size_for_shared_caches == batch_size, "invalid batch_size_for_shared_caches"
        if estimates is not None:
            longest = max(estimates) if isinstance(estimates, list) else estimates
            assert most >= longest, f"Max context_length_estimate {longest} cannot be more than max n_positions {most}."
        self.config = config
        self.batch_size, self.n_positions = batch_size, most
        self.context_buckets = sorted(estimates) if isinstance(estimates, list) else [estimates or most // 2]
        self._path = path
        self._graphs: Graphs | None = None
        self._compiled: str | None = None

    def load(self, directory: str) -> None:
        record("load", directory=str(directory))
        self._compiled = directory

    def to_neuron(self) -> None:
        record("to_neuron", cwd=str(Path.cwd()))
        if fails("device"):
            raise RuntimeError("The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged")
        if fails("memory"):
            raise RuntimeError("nrt_tensor_allocate status=4 message=Allocation Failure")
        if self._compiled is not None and not (Path(self._compiled) / _GRAPH).is_file():
            raise FileNotFoundError("Could not find a matching NEFF for your HLO in this directory.")
        if self._compiled is None and fails("compile"):
            raise RuntimeError("neuronxcc failed: Error class: CompilerInternalError")
        self._graphs = Graphs(_weights(self._path), self.batch_size, self.n_positions)

    def save(self, directory: str, sharded_weights: bool = False) -> None:
        record("save", directory=str(directory))
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / _GRAPH).write_bytes(b"neff")

    def __call__(self, input_ids: torch.Tensor, cache_ids: torch.Tensor, start_ids: torch.Tensor) -> torch.Tensor:
        return self.forward(input_ids, cache_ids, start_ids)

    def forward(self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        assert self._graphs is not None, "to_neuron comes first"
        if fails("first step"):
            raise RuntimeError("nrt_execute status=1200 message=NEFF and the core do not fit")
        if fails("core") and input_ids.shape[1] == 1 and bool((cache_ids > 40).any()):
            raise RuntimeError("nrt_execute status=1202 message=hardware error")
        if self.neuron_config.continuous_batching is not None:
            return self._batched(input_ids, cache_ids, start_ids)
        return self._together(input_ids, cache_ids, start_ids)

    def _batched(self, input_ids: torch.Tensor, cache_ids: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """Compute a prompt, padded to a bucket, in its line; or one token of every line, 0 at 0 in those not given."""
        assert self._graphs is not None
        assert input_ids.shape == cache_ids.shape
        assert len(lines) == len(input_ids)
        length = input_ids.shape[1]
        if length > 1:
            bucket = next((size for size in self.context_buckets if size >= length), None)
            assert bucket is not None, f"invalid input prompt length ({length} <= {self.context_buckets[-1]})"
            assert len(input_ids) == 1
            assert int(cache_ids[0, 0]) == 0
            padded = torch.nn.functional.pad(input_ids, (0, bucket - length))
            positions = torch.arange(bucket).unsqueeze(0)
            return self._graphs.compute(padded, positions, lines)[:, length - 1]
        full, places = (torch.zeros(self.batch_size, 1, dtype=torch.long) for _ in range(2))
        full[lines], places[lines] = input_ids, cache_ids
        return self._graphs.compute(full, places, torch.arange(self.batch_size))[lines, -1]

    def _together(self, input_ids: torch.Tensor, cache_ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        assert self._graphs is not None
        assert len(input_ids) == self.batch_size
        assert cache_ids.ndim == 1
        positions = cache_ids.unsqueeze(0).expand(self.batch_size, -1)
        return self._graphs.compute(input_ids, positions, torch.arange(self.batch_size), starts)[:, -1]


def _weights(path: str) -> Any:
    """Load a checkpoint as it is, or one that save_pretrained_split has written."""
    split = Path(path) / "pytorch_model.bin"
    if not split.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    import json

    names = json.loads((split / "key_to_filename.json").read_text())
    config = AutoConfig.from_pretrained(path)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict({key: torch.load(split / name) for key, name in names.items()}, strict=False)
    return model.eval()

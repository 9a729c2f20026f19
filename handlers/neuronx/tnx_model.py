"""A model that transformers-neuronx loads and compiles.

The calls are those of its version of December 2024: `NeuronAutoModelForCausalLM.from_pretrained`, `load`, `to_neuron`,
`save`, and `forward(input_ids, cache_ids, start_ids)`.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch

from handlers.neuron_failures import failures_of_load, failures_of_step
from handlers.neuronx.options import NeuronxOptions
from handlers.rolling_batch.runner.bucket_runner import AlignedRunner, LineRunner
from lmi_server.contract.errors import ModelLoadError

LIBRARY = "transformers-neuronx"
MODEL_TYPES = ("bloom", "code_llama", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt")
_CONTINUOUS = ("code_llama", "llama", "mistral", "mixtral")  # with a line of the KV cache for each sequence


def load(
    path: str, config: Any, options: NeuronxOptions, graphs: Path | None, save_to: Path | None
) -> LineRunner | AlignedRunner:
    """Load the model in `path` with its compiled `graphs`, or compile them; write them to `save_to`.

    Raises ModelLoadError.
    """
    if config.model_type not in MODEL_TYPES:
        raise ModelLoadError(
            f"{path}: {LIBRARY} has no model of type {config.model_type}, only {', '.join(MODEL_TYPES)}; set"
            " option.model_loader=optimum"
        )
    continuous = _is_continuous(config.model_type, options)
    with failures_of_load(LIBRARY, path):
        model = _from_pretrained(path, options, continuous)
        if graphs is not None:
            model.load(str(graphs))
        with contextlib.chdir(tempfile.gettempdir()):  # the compiler leaves files in the working directory
            model.to_neuron()
            if save_to is not None:
                model.save(str(save_to))
    vocabulary = int(config.vocab_size)
    if continuous:
        return LineRunner(_Lines(model, vocabulary, options.lines, options.prompt_buckets()))
    return AlignedRunner(_Rows(model, vocabulary, options.lines, options.n_positions))


def save_split(path: str, options: NeuronxOptions, directory: Path) -> None:
    """Write the weights as a file each, which the Neuron cores then read one by one (LMI's schema legacy)."""
    from transformers_neuronx.module import save_pretrained_split

    with failures_of_load(LIBRARY, path):
        save_pretrained_split(_weights(path, options), str(directory))


def save_safetensors(path: str, options: NeuronxOptions, directory: Path) -> None:
    """Write the weights as safetensors (LMI's schema safetensors)."""
    with failures_of_load(LIBRARY, path):
        _weights(path, options).save_pretrained(directory)


def _weights(path: str, options: NeuronxOptions) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(  # a local directory  # nosec B615
        path, trust_remote_code=options.trust_remote_code
    )


def _is_continuous(model_type: str, options: NeuronxOptions) -> bool:
    """Return whether each sequence gets a line of the KV cache. Raises ModelLoadError if it was asked for in vain."""
    asked = options.rolling_batch_strategy
    if asked == "continuous_batching" and model_type not in _CONTINUOUS:
        raise ModelLoadError(
            f"option.rolling_batch_strategy=continuous_batching: {LIBRARY} has it for {', '.join(_CONTINUOUS)} and not"
            f" for {model_type}; use naive_rolling_batch"
        )
    return options.lines > 1 and model_type in _CONTINUOUS and asked != "naive_rolling_batch"


def _from_pretrained(path: str, options: NeuronxOptions, continuous: bool) -> Any:
    from transformers_neuronx import (
        ContinuousBatchingConfig,
        NeuronAutoModelForCausalLM,
        NeuronConfig,
        QuantizationConfig,
    )

    arguments = dict(options.tnx_arguments())
    config = dict(arguments.pop("neuron_config"))
    if "quant" in config:
        config["quant"] = QuantizationConfig(**config["quant"])
    if continuous:
        config["continuous_batching"] = ContinuousBatchingConfig(batch_size_for_shared_caches=options.lines)
        arguments["n_positions"] = [options.n_positions]  # one graph to decode with, of full length
    return NeuronAutoModelForCausalLM.from_pretrained(path, neuron_config=NeuronConfig(**config), **arguments)


class _Lines:
    """The graphs of a model with continuous batching; `start_ids` are the lines of the KV cache."""

    def __init__(self, model: Any, vocabulary: int, lines: int, prompt_buckets: tuple[int, ...]) -> None:
        self._model = model
        self._all = torch.arange(lines)
        self.vocabulary = vocabulary
        self.lines = lines
        self.prompt_buckets = prompt_buckets

    def prefill(self, token_ids: torch.Tensor, length: int, line: int) -> torch.Tensor:
        """Compute a prompt. The library pads by itself: it takes the last position for that of the last token."""
        with failures_of_step(), torch.inference_mode():
            positions = torch.arange(length).unsqueeze(0)
            logits: torch.Tensor = self._model(token_ids[:, :length], positions, torch.tensor([line]))
        return logits[0]

    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with failures_of_step(), torch.inference_mode():
            return self._model(token_ids, positions, self._all)


class _Rows:
    """The graphs of a model without it; `start_ids` are the numbers of padding tokens on the left."""

    def __init__(self, model: Any, vocabulary: int, rows: int, max_len: int) -> None:
        self._model = model
        self.vocabulary = vocabulary
        self.rows = rows
        self.max_len = max_len

    def prefill(self, token_ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self._compute(token_ids, torch.arange(token_ids.shape[1]), starts)

    def decode(self, token_ids: torch.Tensor, column: int, starts: torch.Tensor) -> torch.Tensor:
        return self._compute(token_ids, torch.tensor([column]), starts)

    def _compute(self, token_ids: torch.Tensor, columns: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        with failures_of_step(), torch.inference_mode():
            return self._model(token_ids, columns, starts)

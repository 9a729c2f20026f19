"""A model that optimum-neuron loads and compiles; the calls are those of its version 0.4.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from handlers.neuron_failures import failures_of_load, failures_of_step
from handlers.neuronx.options import COMPILED_BY_OPTIMUM, NeuronxOptions
from handlers.rolling_batch.runner.bucket_runner import LineRunner
from lmi_server.contract.errors import ModelLoadError

LIBRARY = "optimum-neuron"


def load(path: str, config: Any, options: NeuronxOptions, save_to: Path | None) -> LineRunner:
    """Load the compiled model in `path`, or compile it; write it to `save_to`. Raises ModelLoadError."""
    with failures_of_load(LIBRARY, path):
        from optimum.neuron import NeuronModelForCausalLM

        is_compiled = (Path(path) / COMPILED_BY_OPTIMUM).is_file()
        model = NeuronModelForCausalLM.from_pretrained(path) if is_compiled else _compile(path, config, options)
        _check(model.neuron_config, path, options)
        if save_to is not None:
            model.save_pretrained(str(save_to))
    return LineRunner(_Lines(model, int(config.get_text_config().vocab_size)))


def _check(compiled: Any, path: str, options: NeuronxOptions) -> None:
    """Refuse graphs that return tokens, or were compiled for other values than the options have."""
    if compiled.on_device_sampling:
        raise ModelLoadError(
            f"{path} was compiled to sample on the device, and here requests choose how to sample; name the original"
            " model in option.model_id, which is then compiled without that"
        )
    asked = {
        "option.n_positions": (options.n_positions, compiled.sequence_length),
        "option.tensor_parallel_degree": (options.degree, compiled.tp_degree),
        "option.max_rolling_batch_size": (options.lines, compiled.batch_size),
    }
    wrong = [f"{key}={has} in place of {wanted}" for key, (wanted, has) in asked.items() if wanted != has]
    if wrong:
        raise ModelLoadError(f"{path} was compiled for other shapes; set {', '.join(wrong)}, or compile it again")


def _compile(path: str, config: Any, options: NeuronxOptions) -> Any:
    from optimum.neuron import NeuronModelForCausalLM

    # The library's defaults for the model and the device come first. Sampling on the device is among them.
    neuron_config = NeuronModelForCausalLM.get_neuron_config(
        path,
        config=config,
        batch_size=options.lines,
        sequence_length=options.n_positions,
        tensor_parallel_size=options.degree,
    )
    for name, value in options.optimum_arguments().items():
        setattr(neuron_config, name, getattr(torch, value) if name == "torch_dtype" else value)
    return NeuronModelForCausalLM.export(
        path, neuron_config, config=config, load_weights=True, trust_remote_code=options.trust_remote_code
    )


class _Lines:
    """The graphs of the model; `seq_ids` are the lines of the KV cache. They return the logits of the last token."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        neuron = model.neuron_config
        self._model = model
        self.vocabulary = vocabulary
        self.lines = int(neuron.batch_size)
        self.prompt_buckets: tuple[int, ...] = (int(neuron.max_context_length),)
        self._all = torch.arange(self.lines)
        self._sampling = torch.ones(
            self.lines, 3
        )  # top_k, top_p, temperature: inputs of the graphs, which do not read them

    def prefill(self, token_ids: torch.Tensor, length: int, line: int) -> torch.Tensor:
        """Compute a prompt. The library pads by itself: it takes the last position for that of the last token."""
        return self._compute(
            token_ids[:, :length], torch.arange(length).unsqueeze(0), torch.tensor([line]), self._sampling[:1]
        )[0]

    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._compute(token_ids, positions, self._all, self._sampling)

    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, lines: torch.Tensor, sampling: torch.Tensor
    ) -> torch.Tensor:
        with failures_of_step(), torch.inference_mode():
            logits: torch.Tensor = self._model.forward(
                input_ids=token_ids, position_ids=positions, seq_ids=lines, sampling_params=sampling
            )
        return logits[:, -1].float()

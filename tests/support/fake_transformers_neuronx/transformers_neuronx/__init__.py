"""A fake of transformers-neuronx; see the README beside it."""

from transformers_neuronx.config import ContinuousBatchingConfig, GenerationConfig, NeuronConfig, QuantizationConfig
from transformers_neuronx.modeling_auto import NeuronAutoModelForCausalLM
from transformers_neuronx.recorded import calls

__version__ = "0.13.fake"
__all__ = [
    "ContinuousBatchingConfig",
    "GenerationConfig",
    "NeuronAutoModelForCausalLM",
    "NeuronConfig",
    "QuantizationConfig",
    "calls",
]

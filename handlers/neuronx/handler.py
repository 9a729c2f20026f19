"""The handler of transformers-neuronx and optimum-neuron, under this project's own rolling batch.

Torch and Neuron's libraries are imported when the model loads, never with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handlers.neuronx.options import NeuronxOptions
from handlers.rolling_batch.handler import SchedulingHandler
from lmi_server.contract.errors import needs_extra

if TYPE_CHECKING:
    from handlers.rolling_batch.engine_loading import LoadedEngine


class NeuronxHandler(SchedulingHandler):
    """Serves a causal language model whose graphs Neuron's compiler makes for fixed shapes."""

    def load_engine(self, model_dir: str, options: NeuronxOptions) -> LoadedEngine:
        with needs_extra("the rolling batch needs", "huggingface"):
            from handlers.neuronx.loading import load_engine
        return load_engine(model_dir, options)

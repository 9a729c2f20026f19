"""The handler of transformers-neuronx and optimum-neuron, under this project's own rolling batch.

Torch and Neuron's libraries are imported when the model loads, never with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handlers.neuronx.options import NeuronxOptions
from handlers.rolling_batch.handler import SchedulingHandler
from lmi_server.contract.errors import ModelLoadError

if TYPE_CHECKING:
    from handlers.rolling_batch.engine_loading import LoadedEngine


class NeuronxHandler(SchedulingHandler):
    """Serves a causal language model whose graphs Neuron's compiler makes for fixed shapes."""

    def load_engine(self, model_dir: str, options: NeuronxOptions) -> LoadedEngine:
        try:
            from handlers.neuronx.loading import load_engine
        except ImportError as error:
            raise ModelLoadError(
                f"the rolling batch needs the extra 'huggingface' ({error}); install lmi-server[huggingface]"
            ) from error
        return load_engine(model_dir, options)

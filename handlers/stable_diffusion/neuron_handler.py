"""The stable_diffusion handler on AWS Inferentia and Trainium: pipelines that optimum-neuron compiles.

LMI has it as stable_diffusion_inf2, or as transformers_neuronx with option.use_stable_diffusion.
"""

from __future__ import annotations

from typing import Any

from handlers.stable_diffusion.handler import StableDiffusionHandler
from handlers.stable_diffusion.requests import ImageModel
from lmi_server.contract.errors import ModelLoadError, describe


class NeuronImageHandler(StableDiffusionHandler):
    """Serves a directory with a model_index.json, of compiled graphs or of weights to compile."""

    def load(self, directory: str, options: Any) -> ImageModel:
        try:
            from handlers.stable_diffusion.neuron_pipelines import NeuronPipelines
        except Exception as error:  # the border to the library: placeholders of Neuron's packages raise as well
            raise ModelLoadError(
                f"the model needs the Python package optimum-neuron, which cannot be imported ({describe(error)});"
                " install it with pip install optimum-neuron[neuronx,diffusers] and the address of Neuron's own package"
                " index"
            ) from error
        return NeuronPipelines(directory, options)

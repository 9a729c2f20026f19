"""The name of LMI's service of Stable Diffusion on AWS Inferentia, up to 0.33. It refuses to run."""

from __future__ import annotations

from djl_python.not_here import ServiceNotHere


class StableDiffusionNeuronXService(ServiceNotHere):
    instead = "this server has no handler for Neuron devices; call diffusers from handle() in model.py"

"""Images from texts and images: pipelines of diffusers, such as Stable Diffusion, SDXL, SD3 and Flux.

Only `pipelines.py` imports diffusers, and `neuron_pipelines.py` optimum-neuron; the handlers import them when the model
loads. Tests draw with tiny pipelines on the CPU, and over a fake of optimum-neuron that has its signatures; nothing ran
on a GPU or on Neuron cores.
"""

"""Images from texts and images: pipelines of diffusers, such as Stable Diffusion, SDXL, SD3 and Flux.

Only `pipelines.py` imports torch and diffusers, which `handler.py` imports when the model loads.
"""

"""Images in prompts: from the files of a request to rows of a flat pass.

options.py       the keys
loading.py       loads a checkpoint that reads images: its text model, its processor and its encoder
processors.py    transformers' processor of a checkpoint
text_model.py    the model behind the images, as a causal language model
encoder.py       the model's own code from pixels to embeddings
check.py         compares a prompt with an image under the rolling batch with the model as it was loaded
files.py         the images of a request, within its limits
reader.py        pixels and text of one image, by the processor
features.py      what is kept of encoded images
intake.py        a request with images on its way to the engine
prompt.py        the images of a prompt, for the scheduler and for the pass
"""

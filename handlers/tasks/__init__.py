"""Tasks that the rolling batch is not for: one class per way to run a Hugging Face model on a batch of requests.

Modules beside `handler.py`, `task_handler.py` and `options.py` import torch and are imported when a model loads.
"""

"""Tasks of Hugging Face models that need no rolling batch: one class per way to run a model on a batch of requests.

`handler.py`, `task_handler.py`, `task.py` and `options.py` import no torch; the others are imported when a model loads.
"""

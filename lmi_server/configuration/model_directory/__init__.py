"""What the files of a model say: its location, config.json or GGUF header, model.py, and its memory."""

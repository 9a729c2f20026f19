"""TensorRT-LLM: its options; the handler is not part of this version."""

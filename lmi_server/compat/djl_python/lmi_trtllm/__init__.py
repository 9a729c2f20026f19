"""LMI's service of TensorRT-LLM, which this server does not have."""

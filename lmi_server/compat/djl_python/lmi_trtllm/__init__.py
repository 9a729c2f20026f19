"""LMI's service of TensorRT-LLM. This server has its own handler instead."""

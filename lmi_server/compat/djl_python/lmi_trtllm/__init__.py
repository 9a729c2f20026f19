"""LMI's service of TensorRT-LLM, in whose place this server has a handler of its own."""

"""vLLM behind the vllm handler; imported when a model loads, never before."""

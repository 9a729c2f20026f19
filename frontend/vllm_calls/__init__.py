"""vLLM's calls that manage a loaded model: sleep, adapters, the prefix cache, and the end of requests."""

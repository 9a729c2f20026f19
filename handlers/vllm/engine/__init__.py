"""The engine in a worker: how it loads, what drives it, its ranks, adapters and statistics. All import vLLM."""

"""A fake of NVIDIA's tensorrt_llm for tests; see ../README.md. This is the class LLM of the PyTorch backend."""

from tensorrt_llm.llmapi import LLM, SamplingParams
from tensorrt_llm.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]

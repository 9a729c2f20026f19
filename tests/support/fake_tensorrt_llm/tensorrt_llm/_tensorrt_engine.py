"""The class LLM of the backend that builds engines of TensorRT."""

from tensorrt_llm.llmapi.llm import TrtLLM as LLM  # noqa: N814 - a class, though in capitals

__all__ = ["LLM"]

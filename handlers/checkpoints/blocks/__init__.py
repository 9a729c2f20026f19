"""Weights of few bits in blocks, as ggml defines them: their formats, and layers that hold them as they are stored."""

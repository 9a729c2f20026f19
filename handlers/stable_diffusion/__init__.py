"""Stable Diffusion: its options; the handler is not part of this version."""

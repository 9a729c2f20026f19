"""Attention over the slots of the KV cache: of one query token for each sequence, and of chunks of prompts."""

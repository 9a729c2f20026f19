"""What vLLM adds to OpenAI's API.

tokens.py   /tokenize and /detokenize
scores.py   /score and /rerank
"""

"""Chats with tools and reasoning: the forms in which model families write them, and the parser of an answer.

Every handler that generates text may import it. Only `answers.py` imports an engine's library, transformers.
"""

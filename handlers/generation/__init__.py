"""The common needs of engines that generate text: token ids of prompts, texts of tokens, limits of new tokens.

Imports `chats/`, `checkpoints/`, and of lmi_server the contract. It must not import an engine.
"""

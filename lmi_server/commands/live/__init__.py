"""Commands that show a running server in the terminal: a chat with a model, and what the server does."""

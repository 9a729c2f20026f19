"""The lines of OpenAI's batches, and the command that answers a file of them without a server."""

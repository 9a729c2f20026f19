"""OpenAI's responses with memory: they are kept, continued, read again, and made in the background."""

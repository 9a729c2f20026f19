"""The prompts of files."""

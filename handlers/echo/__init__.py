"""The smallest handler: it echoes the words of the prompt. Tests and benchmarks of the relay use it."""

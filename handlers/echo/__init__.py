"""The smallest handler: it answers with the words of the prompt. Tests and benchmarks of the relay use it."""

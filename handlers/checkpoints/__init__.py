"""Reading Hugging Face checkpoints with transformers, for every handler that does. Importing it imports torch."""

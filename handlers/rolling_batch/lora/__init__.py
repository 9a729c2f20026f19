"""LoRA adapters of the rows of a step."""

"""The LoRA adapters of one model: registered with its workers, loaded on demand, and listed from their store."""

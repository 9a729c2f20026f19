"""transformers-neuronx: its options; the handler is not part of this version."""

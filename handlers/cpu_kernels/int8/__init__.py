"""Products of weights of few bits and activations that are rounded to 8 bits."""

"""Weights in 8-bit floats on GPUs: quantised while a model loads, multiplied by tensor cores as they are."""

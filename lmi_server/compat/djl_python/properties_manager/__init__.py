"""The configuration of a model as typed values."""

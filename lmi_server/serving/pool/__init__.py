"""The workers of one model: how many there are, and whether they make progress."""

"""Linear layers whose weights have few bits: their layout, unpacking, and products."""

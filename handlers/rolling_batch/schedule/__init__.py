"""Which sequences a step computes, and where their keys and values are. Plain data in, plain data out."""

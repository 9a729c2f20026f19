"""The requests that the engine has, the choice of their tokens, and the deltas of these."""

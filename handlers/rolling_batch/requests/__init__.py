"""The requests that the engine has, and the choice of their tokens."""

"""Tasks of models that read a text and generate none: vectors of it."""

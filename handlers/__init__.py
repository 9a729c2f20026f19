"""One adapter per engine; each is reached by its name in the table of handlers."""

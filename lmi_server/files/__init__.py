"""Files as a whole: written at once, compared with what they were, executed as Python."""

"""Drafted tokens, by a draft model or by the text before."""

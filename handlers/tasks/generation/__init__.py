"""Whole tasks that generate text: translation, summarisation, and completion in static batches."""

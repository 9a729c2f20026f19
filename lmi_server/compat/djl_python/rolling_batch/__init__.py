"""The base class of a rolling batch that user code brings."""

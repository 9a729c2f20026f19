"""The version that the fake stands in for."""

__version__ = "1.1.0"

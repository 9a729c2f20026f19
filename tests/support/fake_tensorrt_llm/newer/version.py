"""The version that the newer fake stands in for."""

__version__ = "1.4.0"

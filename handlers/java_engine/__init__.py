"""Engines of DJL that run in Java: their options, so that such a configuration is refused by name."""

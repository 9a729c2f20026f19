"""Prints configurations for people: `lmi-server explain` and `check`, and the reference page docs/configuration.md."""

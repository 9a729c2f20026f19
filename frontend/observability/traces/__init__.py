"""Traces of requests, for OpenTelemetry: a feature of the table."""

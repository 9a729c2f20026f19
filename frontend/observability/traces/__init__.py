"""Traces of requests, for OpenTelemetry."""

"""Requests that run without a client, whose answers are kept."""

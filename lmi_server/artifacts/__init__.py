"""Brings a model's files to this machine before a worker is started: see `fetch.fetch_artifacts`."""

"""The life of worker processes: launch, log, watch, restart, end.

It knows no queue and no HTTP.
"""

"""The life of worker processes: launch, log, watch, restart, end.

Imports `contract`, `machine` and `configuration`; it knows no queue and no HTTP.
"""

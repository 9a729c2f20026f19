"""What an operator sees: metrics, traces, the access log and the server's log.

The relay tells `request_reports.py` of each request that has ended. A `request_record.py` of it goes to the metrics
(`metrics/`), to the access log (`request_log.py`) and to traces: `tracing.py` chooses the requests, `spans.py` makes
the spans. `error_rates.py` lets `/ping` fail after too many errors. `server_log.py` writes the log of the process.
"""

"""What an operator sees: metrics, traces, the access log and the server's log."""

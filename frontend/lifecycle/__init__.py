"""The server's readiness and its end."""

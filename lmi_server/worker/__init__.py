"""What runs inside a worker process, `python -m lmi_server.worker`: it answers the requests that come over the link.

Imports `contract`, `machine`, `configuration` and `dialects`; it reaches a handler by its name in the Load message.
"""

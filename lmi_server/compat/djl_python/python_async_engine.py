"""The names of LMI's worker for asynchronous functions. The server starts workers of its own."""

from __future__ import annotations

from djl_python.python_sync_engine import PythonSyncEngine

REQUEST_TRACKING_ID_KEY = "request_tracking_id"
"""The property by which LMI's front end finds the request of an answer."""


class PythonAsyncEngine(PythonSyncEngine):
    """Cannot be made."""

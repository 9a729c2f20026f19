"""What the libraries of a worker are told before they are loaded, so that they and the front end share the cores."""

from __future__ import annotations

from collections.abc import Mapping

# OpenMP threads that wait for the next operation spin. On cores that the front end and the kernel's network work share
# with them, spinning for libgomp's default of milliseconds takes the time slice of those who have work.
THREAD_VARIABLES: Mapping[str, str] = {"GOMP_SPINCOUNT": "10000", "TOKENIZERS_PARALLELISM": "false"}

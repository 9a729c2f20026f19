"""Environment variables of a worker's libraries, so that the worker shares the cores with the front end."""

from __future__ import annotations

from collections.abc import Mapping

# OpenMP threads spin while they wait for the next operation. libgomp's default is to spin for milliseconds, which takes
# the time slices of the front end and of the kernel's network work on the same cores.
THREAD_VARIABLES: Mapping[str, str] = {"GOMP_SPINCOUNT": "10000", "TOKENIZERS_PARALLELISM": "false"}

"""The package that a `model.py` written for LMI imports: requests, answers, and codecs between bytes and values.

Only workers have it on their path. It imports nothing but the base install until a call needs tensors or images.
"""

from __future__ import annotations

from djl_python.absent_modules import add_importer
from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.pair_list import PairList
from djl_python.session_manager import Session, SessionManager

__all__ = ["Input", "Output", "PairList", "Session", "SessionManager"]

add_importer()

__version__ = "0.36.0"
"""The release of LMI's package whose interface this one has. Code compares it, so it is not this server's version."""

"""What a `model.py` written for LMI imports: requests, answers, and the codecs between bytes and values.

On the path of workers only. Needs nothing but the standard library until tensors or images are asked for.
"""

from __future__ import annotations

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.pair_list import PairList
from djl_python.session_manager import Session, SessionManager

__all__ = ["Input", "Output", "PairList", "Session", "SessionManager"]

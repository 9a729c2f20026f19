"""The names of LMI's asynchronous service of vLLM. The server's own handler takes its place, so they refuse to run."""

from __future__ import annotations

from djl_python.not_here import VLLM, ServiceNotHere, function_not_here
from djl_python.session_utils import close_session, create_session

SESSION_REQUESTS = {"NEW_SESSION": create_session, "CLOSE": close_session}


class VLLMHandler(ServiceNotHere):
    instead = VLLM


custom_service = None
service = VLLMHandler()

handle = function_not_here("handle", VLLM)
register_adapter = function_not_here("register_adapter", VLLM)
update_adapter = function_not_here("update_adapter", VLLM)
unregister_adapter = function_not_here("unregister_adapter", VLLM)

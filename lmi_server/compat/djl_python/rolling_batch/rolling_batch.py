"""The base class of a rolling batch that user code brings: it keeps the running requests and reports their steps."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from djl_python.request import Request
from djl_python.request_io import Token
from djl_python.utils import IdCounter

logger = logging.getLogger(__name__)

FINISH_REASON_MAPPER = ["length", "eos_token", "stop_sequence"]
_FAILED = "exception occurred during rolling batch inference"
_FAILED_CODE = 424


def filter_unused_generation_params(
    parameters: dict[str, Any], allowed_params: Collection[str], backend: str, remove_unused_params: bool = False
) -> dict[str, Any]:
    """Warn of parameters that are not in `allowed_params`; return `parameters`, without these if they are removed."""
    unused = sorted(parameters.keys() - set(allowed_params))
    if unused:
        logger.warning("%s does not take the parameters %s; it takes %s", backend, unused, sorted(allowed_params))
    for name in unused if remove_unused_params else ():
        del parameters[name]
    return parameters


def stop_on_any_exception(func: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    """Decorate a step: if it raises, every running request ends with an error and the batch begins anew."""

    @functools.wraps(func)
    def step(self: RollingBatch, *arguments: Any, **keywords: Any) -> list[dict[str, Any]]:
        try:
            return func(self, *arguments, **keywords)
        except Exception:  # the border to the engine that a subclass drives
            ids = [request.get_client_request_id() for request in self.active_requests]
            logger.exception("a step of the rolling batch raised; it ends the requests %s", ids)
        for request in self.active_requests:
            token = Token(-1, "", log_prob=-1, special_token=True, error_msg=_FAILED)
            request.set_next_token(token, last_token=True, finish_reason="error")
            request.set_error_message(_FAILED)
            request.set_error_code(_FAILED_CODE)
        results = self.postprocess_results()
        self.reset()
        return results

    return step


class RollingBatch(ABC):
    """Subclasses write `inference`, one step: add the new requests, set each one's next token, return the results."""

    def __init__(self, configs: Any) -> None:
        self.active_requests: list[Request] = []
        self.req_id_counter = IdCounter()
        self.configs = configs

    def reset(self) -> None:
        """Forget every request."""
        self.active_requests = []
        self.req_id_counter.reset()

    @abstractmethod
    def inference(self, new_requests: list[Request]) -> list[dict[str, Any]]:
        """Do one step; return a result for each running request."""

    @abstractmethod
    def preprocess_requests(self, requests: list[Request]) -> Any:
        """Convert requests to what the engine takes."""

    def add_new_requests(self, requests: list[Request]) -> None:
        self.active_requests.extend(requests)

    def postprocess_results(self) -> list[dict[str, Any]]:
        """Return the step of each running request, and drop ended ones."""
        results = [_result(request) for request in self.active_requests]
        self.active_requests = [request for request in self.active_requests if not request.is_last_token()]
        return results

    def get_tokenizer(self) -> Any:
        raise RuntimeError("get_tokenizer function not supported")

    def get_model_config(self) -> Any:
        raise RuntimeError("get_model_config must be implemented by subclass")

    def get_huggingface_model_config(self) -> Any:
        raise RuntimeError("get_huggingface_model_config must be implemented by subclass")

    def use_vllm_chat_completions(self) -> bool:
        return False

    def get_tool_parser(self) -> Any:
        return None

    def get_reasoning_parser(self) -> Any:
        return None

    def add_lora(self, lora_name: str, lora_path: str, long_lora_max_len: int | None = None) -> Any:
        raise NotImplementedError("add_lora must be implemented by subclass")

    def remove_lora(self, lora_name: str) -> Any:
        raise NotImplementedError("remove_lora must be implemented by subclass")

    def pin_lora(self, lora_name: str) -> Any:
        raise NotImplementedError("pin_lora must be implemented by subclass")


def _result(request: Request) -> dict[str, Any]:
    result: dict[str, Any] = {
        "data": request.get_next_token(),
        "last": request.is_last_token(),
        "content_type": request.get_content_type(),
        "request_id": request.get_client_request_id(),
    }
    if request.get_error_message():
        result["error"] = request.get_error_message()
    if request.get_error_code():
        result["code"] = request.get_error_code()
    request.reset_next_token()
    return result

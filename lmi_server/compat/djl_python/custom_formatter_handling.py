"""Finds and calls the functions of a model.py that replace parts of a handler, for handlers in user code."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from djl_python.service_loader import get_annotated_function
from djl_python.utils import get_sagemaker_function

Function = Callable[..., Any] | None


class CustomFormatterError(Exception):
    """A function of the model.py raised `original_exception`, or could not be loaded."""

    def __init__(self, message: str, original_exception: BaseException) -> None:
        super().__init__(message)
        self.original_exception = original_exception
        self.__cause__ = original_exception


class CustomFormatterHandler:
    """The decorated functions of a model.py, or else the functions with SageMaker's names."""

    def __init__(self) -> None:
        self.input_formatter: Function = None
        self.output_formatter: Function = None
        self.prediction_handler: Function = None
        self.init_handler: Function = None
        self.is_sagemaker_script = False

    def load_formatters(self, model_dir: str, namespace: str | None = None) -> None:
        """Load the functions. Raises CustomFormatterError if model.py cannot be imported."""
        try:
            self.input_formatter = get_annotated_function(model_dir, "is_input_formatter", namespace)
            self.output_formatter = get_annotated_function(model_dir, "is_output_formatter", namespace)
            self.prediction_handler = get_annotated_function(model_dir, "is_prediction_handler", namespace)
            self.init_handler = get_annotated_function(model_dir, "is_init_handler", namespace)
            if not any((self.input_formatter, self.output_formatter, self.prediction_handler, self.init_handler)):
                self._load_sagemaker_functions(model_dir)
        except Exception as error:  # the border to the user's code
            raise CustomFormatterError(f"Failed to load custom code from {model_dir}", error) from error

    def _load_sagemaker_functions(self, model_dir: str) -> None:
        self.init_handler = get_sagemaker_function(model_dir, "model_fn")
        self.input_formatter = get_sagemaker_function(model_dir, "input_fn")
        self.prediction_handler = get_sagemaker_function(model_dir, "predict_fn")
        self.output_formatter = get_sagemaker_function(model_dir, "output_fn")
        found = (self.init_handler, self.input_formatter, self.prediction_handler, self.output_formatter)
        self.is_sagemaker_script = any(found)

    def apply_input_formatter(self, decoded_payload: Any, **kwargs: Any) -> Any:
        """Return what the input formatter makes of a payload; the payload itself without one."""
        if self.input_formatter is None:
            return decoded_payload
        if self.is_sagemaker_script:
            body, kind = decoded_payload.get_as_bytes(), kwargs.get("content_type")
            return _call("input formatter", self.input_formatter, body, kind)
        return _call("input formatter", self.input_formatter, decoded_payload, **kwargs)

    def apply_output_formatter(self, output: Any, **kwargs: Any) -> Any:
        """Return what the output formatter makes of an output; the output itself without one."""
        if self.output_formatter is None:
            return output
        more = (kwargs.get("accept"),) if self.is_sagemaker_script else ()
        return _call("output formatter", self.output_formatter, output, *more)

    async def apply_output_formatter_streaming_raw(
        self, stream_generator: AsyncIterator[Any]
    ) -> AsyncGenerator[Any, None]:
        """Yield what the output formatter makes of each item."""
        async for item in stream_generator:
            yield self.apply_output_formatter(item)

    def apply_init_handler(self, model_dir: str, **kwargs: Any) -> Any:
        """Return the model that the init handler loads; None without one."""
        return self.init_handler and _call("init handler", self.init_handler, model_dir, **kwargs)

    def apply_prediction_handler(self, X: Any, model: Any, **kwargs: Any) -> Any:  # noqa: N803 - LMI's name
        """Return what the prediction handler predicts; None without one."""
        return self.prediction_handler and _call("prediction handler", self.prediction_handler, X, model, **kwargs)


def _call(what: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        return function(*arguments, **keywords)
    except Exception as error:  # the border to the user's code
        raise CustomFormatterError(f"Custom {what} execution failed", error) from error

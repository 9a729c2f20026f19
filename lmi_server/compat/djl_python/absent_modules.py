"""The modules of LMI's worker and engines, whose names can be imported and refuse: one table, and its importer.

Not LMI's module. `djl_python` adds the importer when it is imported itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from djl_python.not_here import (
    TENSORRT_LLM,
    VLLM,
    VLLM_BATCH,
    VLLM_FORMATS,
    ServiceNotHere,
    function_not_here,
    not_here,
)


class Absent(NamedTuple):
    """The names of one module, which refuse with `remedy`; several in a text have spaces between.

    - `service`: a class that can be made, and whose methods refuse; `functions` refuse to be called.
    - `unmade`: a class that cannot be made, with the arguments of its constructor; `base`: module and name of its base.
    - `values`: what does not refuse; `late`: what is made when it is asked for, since it imports more.
    """

    remedy: str
    service: str = ""
    functions: str = ""
    unmade: str = ""
    base: tuple[str, str] | None = None
    values: Mapping[str, Any] = {}
    late: Mapping[str, Callable[[], Any]] = {}


def _import(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _session_requests() -> dict[str, Any]:
    names = {"NEW_SESSION": "create_session", "CLOSE": "close_session"}
    return {kind: _import("djl_python.session_utils", name) for kind, name in names.items()}


def _processed_request(engine: str) -> type:
    """Return the class of a request with its functions."""
    functions = ("inference_invoker", "non_stream_output_formatter", "stream_output_formatter")
    fields: list[Any] = [(f"{engine}_request", Any), *((name, Callable[..., Any]) for name in functions)]
    fields += [("accumulate_chunks", bool), ("include_prompt", bool)]
    module = {"__module__": f"djl_python.lmi_{engine}.request_response_utils"}
    made: type = _import("dataclasses", "make_dataclass")("ProcessedRequest", fields, namespace=module)
    return made


_IN_MODEL_PY = "load the model and call it from handle() in a model.py"
_ARCHIVE = "put a model.py with handle() beside the files of the archive"
_WORKERS = "run lmi-server serve DIR, which starts the workers of the model"
_NEURON = "set option.entryPoint=djl_python.transformers_neuronx; handle() in the model.py beside it gets the requests"
_DIFFUSION = "this server has no handler for Neuron devices; call diffusers from handle() in model.py"
_ROLLING_BATCH = ("djl_python.rolling_batch.rolling_batch", "RollingBatch")
_FORMATTERS = """
convert_lmi_schema_to_completion_request convert_completion_response_to_lmi_schema
convert_completion_chunk_response_to_lmi_schema lmi_with_details_non_stream_output_formatter
lmi_non_stream_output_formatter lmi_with_details_stream_output_formatter lmi_stream_output_formatter
"""

ABSENT: Mapping[str, Absent] = {
    "python_sync_engine": Absent(
        _WORKERS, unmade="PythonSyncEngine args service", values={"SOCKET_ACCEPT_TIMEOUT": 30.0}
    ),
    "python_async_engine": Absent(
        _WORKERS,
        unmade="PythonAsyncEngine args service",
        base=("djl_python.python_sync_engine", "PythonSyncEngine"),
        values={"REQUEST_TRACKING_ID_KEY": "request_tracking_id"},
    ),
    "ts_service_loader": Absent(_ARCHIVE, unmade="TorchServeService service model_dir"),
    "sagemaker": Absent(_IN_MODEL_PY, "SageMakerInferenceService", "handle"),
    "stable_diffusion_inf2": Absent(_DIFFUSION, "StableDiffusionNeuronXService"),
    "transformers_neuronx": Absent(_NEURON, "TransformersNeuronXService", "handle partition"),
    "tensorrt_llm": Absent(TENSORRT_LLM, "TRTLLMService", "handle"),
    "lmi_trtllm.request_response_utils": Absent(
        TENSORRT_LLM,
        functions=f"{_FORMATTERS} trtllm_non_stream_output_formatter trtllm_stream_output_formatter",
        late={"ProcessedRequest": lambda: _processed_request("trtllm")},
    ),
    "rolling_batch.trtllm_rolling_batch": Absent(
        TENSORRT_LLM, unmade="TRTLLMRollingBatch model_id_or_path properties configs", base=_ROLLING_BATCH
    ),
    "rolling_batch.vllm_rolling_batch": Absent(
        VLLM_BATCH,
        unmade="VLLMRollingBatch model_id_or_path properties **kwargs",
        base=_ROLLING_BATCH,
        late={
            "VLLM_GENERATION_PARAMS": lambda: set(_import("vllm.sampling_params", "SamplingParams").__struct_fields__)
        },
    ),
    "rolling_batch.rolling_batch_vllm_utils": Absent(
        VLLM_BATCH,
        functions="update_request_cache_with_output update_multiple_sequences get_speculative_decoding_metrics_record"
        " supports_speculative_decoding create_lora_request get_lora_request get_multi_modal_data get_prompt_inputs"
        " maybe_serialize_tool_calls",
        values={
            "DTYPE_MAPPER": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "auto": "auto"},
            "FINISH_REASON_MAPPER": {"length": "length", "stop": "eos_token", "abort": "abort"},
        },
    ),
    "chat_completions.vllm_chat_utils": Absent(
        VLLM,
        functions="parse_chat_completions_request_vllm tokenize_prompt_input normalize_prompt_text_to_input"
        " normalize_prompt_tokens_to_input validate_input",
        values={"RequestPrompt": str | list[int]},  # a prompt as text or as token ids
    ),
    "lmi_vllm.request_response_utils": Absent(
        VLLM_FORMATS,
        functions=f"{_FORMATTERS} convert_completion_logprobs_to_tgi_tokens convert_completion_prefill_to_tgi_prefill"
        " vllm_non_stream_output_formatter vllm_stream_output_formatter embedding_output_formatter",
        late={"ProcessedRequest": lambda: _processed_request("vllm")},
    ),
    "lmi_vllm.vllm_async_service": Absent(
        VLLM,
        "VLLMHandler",
        "handle register_adapter update_adapter unregister_adapter",
        values={"custom_service": None},
        late={
            "SESSION_REQUESTS": _session_requests,
            "service": lambda: _import("djl_python.lmi_vllm.vllm_async_service", "VLLMHandler")(),
        },
    ),
}
"""By name, the modules that LMI has and this server has not."""


class _Importer(MetaPathFinder, Loader):
    """Makes the modules of the table, as if each had a file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "djl_python" and name in ABSENT else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        absent = ABSENT[name.partition(".")[2]]
        module.__doc__ = f"Names of {name} of LMI. This server has other means in its place, so they refuse to run."
        names = vars(module)
        names.update(absent.values)
        names.update((each, function_not_here(each, absent.remedy)) for each in absent.functions.split())
        if absent.service:
            names[absent.service] = type(
                absent.service, (ServiceNotHere,), {"instead": absent.remedy, "__module__": name}
            )
        if absent.unmade:
            made = _unmade(absent, name)
            names[made.__name__] = made

        def find(each: str) -> Any:
            if each not in absent.late:
                raise AttributeError(f"module {name!r} has no attribute {each!r}")
            names[each] = value = absent.late[each]()
            return value

        names["__getattr__"] = find


def _unmade(absent: Absent, module: str) -> type:
    """Return the class that cannot be made. A subclass can, and then what the base leaves to it refuses."""
    from inspect import Parameter, Signature

    def refuse(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        not_here(type(self).__name__, absent.remedy)

    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        not_here(type(self).__name__, absent.remedy)

    class_name, *arguments = absent.unmade.split()
    kinds = {True: Parameter.VAR_KEYWORD, False: Parameter.POSITIONAL_OR_KEYWORD}
    construct.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(each.lstrip("*"), kinds[each.startswith("**")]) for each in ("self", *arguments)]
    )
    base = object if absent.base is None else _import(*absent.base)
    methods = dict.fromkeys(getattr(base, "__abstractmethods__", ()), refuse)
    attributes = {"__doc__": "Cannot be made.", "__module__": module, "__init__": construct, **methods}
    return type(class_name, (base,), attributes)


def add_importer() -> None:
    """Let Python find the modules of the table, after the ones with files."""
    sys.meta_path.append(_Importer())

"""The services of LMI's built-in handlers in a user's code: they run on this server's handlers, or say what to set."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from own_code_helpers import serving_own
from server_helpers import Server

# --- what belongs to LMI's own worker ---

VLLM_SERVICE = "set option.entryPoint=djl_python.lmi_vllm.vllm_async_service; handle() in the model.py beside it"
NO_TENSORRT = "set option.rolling_batch=trtllm"
NEURON = "set option.entryPoint=djl_python.transformers_neuronx"


@pytest.mark.parametrize(
    ("module", "name", "method", "remedy"),
    [
        ("lmi_vllm.vllm_async_service", "VLLMHandler", "initialize", VLLM_SERVICE),
        ("lmi_vllm.vllm_async_service", "VLLMHandler", "check_health", VLLM_SERVICE),
        ("lmi_trtllm.trtllm_async_service", "TensorRTLlmAsyncService", "inference", NO_TENSORRT),
        ("tensorrt_llm", "TRTLLMService", "initialize", NO_TENSORRT),
        ("transformers_neuronx", "TransformersNeuronXService", "initialize", NEURON),
        ("stable_diffusion_inf2", "StableDiffusionNeuronXService", "inference", "call diffusers from handle()"),
        ("sagemaker", "SageMakerInferenceService", "load", "load the model and call it from handle() in a model.py"),
    ],
)
def test_a_service_without_a_handler_says_what_to_set(
    named: Any, module: str, name: str, method: str, remedy: str
) -> None:
    """A subclass can be made, too: code may replace every method."""
    made = type("Mine", (getattr(named(f"djl_python.{module}"), name),), {})()
    assert not made.initialized
    with pytest.raises(NotImplementedError, match="part of LMI's own worker") as raised:
        getattr(made, method)({})
    assert f"Mine.{method}" in str(raised.value)
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("module", "name", "arguments", "remedy"),
    [
        ("lmi_vllm.vllm_async_service", "handle", [None], VLLM_SERVICE),
        ("lmi_vllm.request_response_utils", "lmi_stream_output_formatter", [""], "@output_formatter"),
        ("lmi_trtllm.request_response_utils", "trtllm_stream_output_formatter", [""], NO_TENSORRT),
        ("chat_completions.vllm_chat_utils", "validate_input", [None, [], "", 1], VLLM_SERVICE),
        ("rolling_batch.rolling_batch_vllm_utils", "get_lora_request", ["a", {}], "rolling_batch.RollingBatch"),
        ("rolling_batch.vllm_rolling_batch", "VLLMRollingBatch", ["", {}], "set option.rolling_batch=vllm"),
        ("rolling_batch.trtllm_rolling_batch", "TRTLLMRollingBatch", ["", {}, None], NO_TENSORRT),
        ("huggingface", "register_adapter", [None], "POST /models/NAME/adapters"),
        ("deepspeed", "partition", [None], "run lmi-server partition DIR"),
        ("python_sync_engine", "PythonSyncEngine", [None, None], "run lmi-server serve DIR"),
        ("python_async_engine", "PythonAsyncEngine", [None, None], "run lmi-server serve DIR"),
        ("ts_service_loader", "TorchServeService", [None, ""], "put a model.py with handle() beside"),
    ],
)
def test_a_function_of_lmis_worker_says_what_to_set(
    named: Any, module: str, name: str, arguments: list[Any], remedy: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name} is part of LMI's own worker") as raised:
        getattr(named(f"djl_python.{module}"), name)(*arguments)
    assert remedy in str(raised.value)


# --- services that run on this server's handlers ---

SERVICES = [
    ("huggingface", "HuggingFaceService", "get_pipeline", ", or option.entryPoint=djl_python.huggingface, with which"),
    ("deepspeed", "DeepSpeedService", "get_model", ", or option.entryPoint=djl_python.deepspeed, with which handle()"),
    ("sklearn_handler", "SklearnHandler", "load_formatters", "set option.rolling_batch=disable"),
    ("xgboost_handler", "XGBoostHandler", "apply_output_formatter", "set option.rolling_batch=disable"),
]


@pytest.mark.parametrize(("module", "name", "inner", "remedy"), SERVICES)
def test_a_service_refuses_what_it_cannot_do(
    named: Any, tmp_path: Path, module: str, name: str, inner: str, remedy: str
) -> None:
    service = getattr(named(f"djl_python.{module}"), name)
    with pytest.raises(TypeError, match=rf"Mine\.{inner} would never be called"):
        type("Mine", (service,), {inner: lambda self: None})
    made = service()
    assert (made.initialized, made.model) == (False, None)
    with pytest.raises(AttributeError, match="it has initialize, inference, model"):
        getattr(made, inner)
    with pytest.raises(RuntimeError, match="call initialize"):
        made.inference(named("djl_python.test_model").create_json_request({"inputs": "a"}))
    with pytest.raises(ValueError, match=r"^option\.rolling_batch=auto: ") as raised:
        made.initialize({"model_dir": str(tmp_path), "rolling_batch": "auto"})
    assert remedy in str(raised.value)


@pytest.mark.parametrize("name", ["input_formatter", "output_formatter"])
def test_a_formatter_that_would_not_be_called_is_refused(named: Any, tmp_path: Path, name: str) -> None:
    """The server hands over one that model.py marks; code may set the property itself, too."""
    properties = {"model_dir": str(tmp_path), name: str}
    with pytest.raises(ValueError, match="HuggingFaceService answers whole requests and calls no formatters") as raised:
        named("djl_python.huggingface").HuggingFaceService().initialize(properties)
    assert str(raised.value).startswith(f"the property {name} is the function str. In a model.py")


def test_a_wrong_value_is_refused_by_its_name(named: Any, tmp_path: Path) -> None:
    properties = {"model_dir": str(tmp_path), "model_format": "zip"}
    with pytest.raises(Exception, match=r'option\.model_format = "zip" is not allowed'):
        named("djl_python.xgboost_handler").XGBoostHandler().initialize(properties)


def test_a_service_is_refused_under_mpi(named: Any, tmp_path: Path) -> None:
    service = named("djl_python.huggingface").HuggingFaceService()
    with pytest.raises(ValueError, match=r"set engine=Python and no option\.mpi_mode, or option\.entryPoint="):
        service.initialize({"model_dir": str(tmp_path), "mpi_mode": "true"})


def test_only_the_rolling_batch_of_vllm_has_a_class(named: Any) -> None:
    choose = named("djl_python.huggingface").get_rolling_batch_class_from_str
    assert choose("vllm").__name__ == "VLLMRollingBatch"
    with pytest.raises(ValueError, match="'lmi-dist' is not allowed; allowed: vllm"):
        choose("lmi-dist")


@pytest.mark.slow
def test_a_table_service_predicts(named: Any, tmp_path: Path) -> None:
    xgboost = pytest.importorskip("xgboost")
    import numpy as np

    rows = np.arange(40.0).reshape(20, 2)
    xgboost.train({"nthread": 1}, xgboost.DMatrix(rows, rows[:, 0]), 3).save_model(tmp_path / "model.json")
    (tmp_path / "model.py").write_text("def handle(inputs): raise ValueError\n")
    module, tools = named("djl_python.xgboost_handler"), named("djl_python.test_model")
    empty = named("djl_python.inputs").make_input({"model_dir": str(tmp_path), "mine": "1"}, [], None)
    assert module.handle(empty) is None
    assert module.service.initialized
    assert isinstance(module.service.model, xgboost.Booster)
    answer = module.handle(tools.create_json_request({"inputs": [[1.0, 2.0]]}))
    assert (answer.code, answer.get_property("Content-Type")) == (200, "application/json")
    (one,) = json.loads(tools.extract_output_as_string(answer))["predictions"]
    batch = module.handle(tools.create_concurrent_batch_request([{"inputs": [[1.0, 2.0]]}, {"x": 1}]))
    assert json.loads(batch.content.values[0])["predictions"] == [one]
    assert "inputs is missing" in json.loads(batch.content.values[1])["error"]
    assert (batch.code, batch.get_property("batch_1_code")) == (200, "424")
    with pytest.raises(Exception, match="inputs is missing"):
        module.handle(tools.create_json_request({"x": 1}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "engine"),
    [("huggingface", "HuggingFaceService", "transformers"), ("deepspeed", "DeepSpeedService", "deepspeed")],
)
def test_a_batch_of_texts(named: Any, tmp_path: Path, module: str, name: str, engine: str) -> None:
    pytest.importorskip(engine)
    from tiny_tasks import make_task_model  # it imports torch

    directory = make_task_model("fill-mask", tmp_path / "model")
    (directory / "serving.properties").write_text("")
    service, tools = getattr(named(f"djl_python.{module}"), name)(), named("djl_python.test_model")
    service.initialize({"model_dir": str(directory), "device_id": "-1"})
    assert service.model_config.model_type == "bert"
    text = {"inputs": "a [MASK]"}
    alone = tools.extract_output_as_bytes(service.inference(tools.create_json_request(text)))
    batch = service.inference(tools.create_concurrent_batch_request([text, {"x": 1}, text]))
    first, refused, last = batch.content.values
    assert json.loads(first)[0][0]["token_str"] == json.loads(last)[0][0]["token_str"]
    assert json.loads(first)[0][0]["token"] == json.loads(alone)[0][0]["token"]
    assert "inputs is missing" in json.loads(refused)["error"]


@pytest.mark.slow
def test_a_module_of_a_service_is_tested_without_a_server(
    named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is named by the directory, by a variable, or with the request."""
    from tiny_tasks import make_task_model  # it imports torch

    directory = make_task_model("fill-mask", tmp_path / "model")
    (directory / "serving.properties").write_text("option.task=fill-mask")
    monkeypatch.chdir(tmp_path)
    module, tools = named("djl_python.huggingface"), named("djl_python.test_model")
    body = {"inputs": "a [MASK]"}

    def token(output: Any) -> str:
        data = output.content.values[0]
        return str(json.loads(data)[0][0]["token_str"])

    expected = token(tools.TestHandler(module, str(directory)).inference(tools.create_json_request(body)))
    given = {"model_id": str(directory), "task": "fill-mask"}
    assert token(tools.TestHandler(module).inference_batch([body], serving_properties=given)) == expected
    assert token(tools.TestHandler("djl_python.huggingface", str(directory)).inference_batch([body])) == expected
    monkeypatch.setenv("HF_MODEL_ID", str(directory))
    handler = tools.TestHandler(module)
    assert handler.serving_properties == {"model_id": str(directory)}
    assert token(handler.inference(tools.create_json_request(body))) == expected
    with pytest.raises(
        ValueError, match=r"option\.rolling_batch=auto: in a model\.py HuggingFaceService answers whole"
    ):
        tools.TestHandler(module).inference_rolling_batch([body], serving_properties={"rolling_batch": "auto"})


SUBCLASS = """
from djl_python import Output
from djl_python.huggingface import HuggingFaceService

class Mine(HuggingFaceService):
    def inference(self, inputs):
        if any(item.get_as_json().get("inputs") == "size" for item in inputs.get_batches()):
            return Output().add_as_json([self.tokenizer.vocab_size, self.model.config.model_type])
        return super().inference(inputs).add_property("x-mine", "1")

service = Mine()

def handle(inputs):
    if not service.initialized:
        service.initialize(inputs.get_properties())
    return None if inputs.is_empty() else service.inference(inputs)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tiny_tasks import make_task_model  # it imports torch

    directory = make_task_model("text-generation", tmp_path_factory.mktemp("weights") / "weights")
    options = {"model_id": str(directory), "enable_streaming": "true"}
    with serving_own(tmp_path_factory.mktemp("service"), SUBCLASS, **options) as server:
        yield server


@pytest.mark.slow
def test_a_subclass_answers_with_the_model(server: Server) -> None:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3}, "stream": False}
    answer = server.http.post("/invocations", json=body)
    assert (answer.status_code, answer.headers["x-mine"]) == (200, "1")
    assert answer.headers["content-type"] == "application/json"
    (generated,) = answer.json()
    assert generated["generated_text"].startswith("a b")
    size, family = server.http.post("/invocations", json={"inputs": "size"}).json()
    assert (size > 3, family) == (True, "llama")


@pytest.mark.slow
def test_a_subclass_streams(server: Server) -> None:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3}, "stream": True}
    answer = server.http.post("/invocations", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jsonlines")
    assert all("outputs" in json.loads(line) for line in answer.text.splitlines())


@pytest.mark.slow
def test_a_subclass_refuses_a_request_as_its_handler_does(server: Server) -> None:
    answer = server.http.post("/invocations", json={"inputs": "a", "parameters": {"top_p": 7}})
    assert answer.status_code == 424
    assert "top_p" in answer.text


def test_stop_words_end_a_generation(named: Any) -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    stop = named("djl_python.huggingface").StopWord(tokenizer, "ab")
    assert [stop([list(text.encode())], None) for text in ("xab", "abx")] == [True, False]


def test_the_filter_keeps_what_sagemaker_counts(named: Any, caplog: pytest.LogCaptureFixture) -> None:
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(named("djl_python.sm_log_filter").SMLogFilter())
    log = logging.getLogger("counted")
    log.addHandler(handler)
    log.propagate = False
    for text in (
        "UserScriptError: model load: 1 Count",
        "hello",
        "SysHealth: broken",
        "UserScriptError: model load: 2 C",
    ):
        log.error(text)
    version = named("djl_python").__version__
    assert written == [
        f"UserScriptError.Count:1|#DJLServing:{version},ModelLoad:1 Count",
        f"UserScriptError.Count:2|#DJLServing:{version},ModelLoad:2 C",
    ]
    assert "SysHealth: broken" in caplog.text

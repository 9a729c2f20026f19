"""Every public name of djl_python has the signature that LMI's has, and works without LMI's engines."""

from __future__ import annotations

import ast
import asyncio
import base64
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

COMPAT = ROOT / "lmi_server/compat"
TABLE: Mapping[str, Mapping[str, str]] = json.loads((ROOT / "tests/data/djl_python_signatures.json").read_text())
"""By module and name the signature of LMI's function, as Python writes it; "" for classes and constants."""
NAMES: Mapping[str, list[str]] = json.loads((ROOT / "tests/data/djl_python_names.json").read_text())
"""Every public name of LMI 0.36, by module, and the services of earlier releases."""
MADE_OF_ENGINES = {"PEFT_MODEL_TASK_TO_CLS": "transformers", "VLLM_GENERATION_PARAMS": "vllm"}
"""Names whose values are an engine's, which is imported for them."""
# A PNG of one pixel.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
ENGINES = ("transformers", "vllm", "torch", "tensorrt_llm", "deepspeed", "sklearn", "xgboost", "skops", "joblib")


def found(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def arguments(signature: str) -> list[tuple[str, Any]]:
    """Return names and defaults of a signature; a default that is no literal is None, a star part of the name."""
    given = ast.parse(f"def f{signature}: ...").body[0].args  # type: ignore[attr-defined]
    names = [argument.arg for argument in given.args]
    defaults = [inspect.Parameter.empty] * (len(names) - len(given.defaults)) + [_literal(d) for d in given.defaults]
    stars = [("*", given.vararg), ("**", given.kwarg)]
    return [*zip(names, defaults, strict=True), *((s + a.arg, inspect.Parameter.empty) for s, a in stars if a)]


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def own_arguments(function: Any) -> list[tuple[str, Any]]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    return [(stars.get(parameter.kind, "") + parameter.name, parameter.default) for parameter in parameters]


def comparable(listed: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return arguments without `self` and `cls`; defaults that are functions or types count as None."""
    kept = [(name, value) for name, value in listed if name not in ("self", "cls")]
    return [(name, None if callable(value) and value is not inspect.Parameter.empty else value) for name, value in kept]


@pytest.mark.parametrize("module", TABLE)
def test_signatures_are_lmis(named: Any, module: str) -> None:
    """Arguments of our own come after LMI's and have defaults."""
    for name, signature in TABLE[module].items():
        value = found(named(module), name)
        if not signature:
            continue
        own, lmis = comparable(own_arguments(value)), comparable(arguments(signature))
        assert own[: len(lmis)] == lmis, f"{module}.{name}"
        assert all(default is not inspect.Parameter.empty for _, default in own[len(lmis) :]), f"{module}.{name}"


def test_every_name_can_be_imported_without_any_engine() -> None:
    names = {module: sorted(set(listed) - MADE_OF_ENGINES.keys()) for module, listed in NAMES.items()}
    code = (
        f"import sys; sys.modules |= dict.fromkeys({ENGINES!r}); from importlib import import_module\n"
        f"names = {names!r}\n"
        "print([(module, name) for module in names for name in names[module]"
        " if not hasattr(import_module(module), name)])"
    )
    environment = {"PYTHONPATH": f"{COMPAT}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), MADE_OF_ENGINES.items())
def test_names_of_an_engine_take_it(named: Any, name: str, engine: str) -> None:
    pytest.importorskip(engine)
    module = next(module for module, names in NAMES.items() if name in names)
    assert len(getattr(named(module), name)) > 4


def test_a_module_without_a_file_is_like_any_other(named: Any) -> None:
    name = "djl_python.lmi_vllm.vllm_async_service"
    module = named(name)
    assert find_spec(name) is not None
    assert module.service is module.service
    assert type(module.service).__module__ == name
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        named("djl_python.lmi_vllm.nothing")
    request = named("djl_python.lmi_vllm.request_response_utils").ProcessedRequest(*range(6))
    assert (request.vllm_request, request.include_prompt) == (0, 5)


def test_what_every_model_imports_is_light() -> None:
    code = (
        "import sys; import djl_python, djl_python.input_parser, djl_python.output_formatter, djl_python.encode_decode;"
        "print(sorted({'pydantic', 'numpy', 'torch', 'PIL', 'transformers', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(COMPAT)}, capture_output=True, text=True)
    assert done.stdout == "['asyncio']\n" or done.stdout == "[]\n", done.stderr


def test_a_rolling_batch_of_user_code(named: Any) -> None:
    """The classes of LMI work together: parse a batch, step it, and answer each step."""
    base, parser = named("djl_python.rolling_batch.rolling_batch"), named("djl_python.input_parser")
    utils, io = named("djl_python.utils"), named("djl_python.request_io")
    inputs, outputs = named("djl_python.inputs"), named("djl_python.outputs")
    settings = named("djl_python.properties_manager.properties").Properties(model_dir="/m", rolling_batch="auto")

    class Echo(base.RollingBatch):
        def preprocess_requests(self, requests: Any) -> Any:
            return requests

        @base.stop_on_any_exception
        def inference(self, new_requests: Any) -> Any:
            self.add_new_requests(new_requests)
            for request in self.active_requests:
                words = request.input_text.split()
                count = len(request.request_output.best_sequence.tokens)
                if words[count] == "raise":
                    raise ValueError("in a step")
                last = count + 1 == len(words)
                request.set_next_token(io.Token(count, words[count]), last, "length" if last else None)
            return self.postprocess_results()

    batch = Echo(settings)

    def step(*bodies: bytes) -> list[dict[str, str]]:
        properties = {"batch_size": str(len(bodies))}
        content = [(f"batch_{index:03d}.data", body) for index, body in enumerate(bodies)]
        given = inputs.make_input(properties, content, "handle")
        parsed = parser.parse_input_with_formatter(given, configs=settings, rolling_batch=batch)
        output = utils.rolling_batch_inference(parsed, given, outputs.Output(), batch)
        return [outputs.Output.binary_decode(value) for value in output.content.values]

    text, stream = b'{"inputs": "a b"}', b'{"inputs": "c d", "stream": true}'
    first = step(text, stream)
    assert [result["last"] for result in first] == ["False", "False"]
    assert (first[0]["data"], json.loads(first[1]["data"])["token"]["text"]) == ("", "c")
    second = step(b"", b"")
    assert json.loads(second[0]["data"]) == {"generated_text": "ab"}
    assert json.loads(second[1]["data"])["generated_text"] == "cd"
    assert batch.active_requests == []
    refused, failed = step(b'{"inputs": 7}', b'{"inputs": "raise"}')
    assert (refused["code"], "Input Parsing failed" in refused["error"]) == ("424", True)
    assert (failed["code"], failed["last"]) == ("424", "True")


def test_adapters_of_user_code(named: Any, tmp_path: Path) -> None:
    mixin = named("djl_python.adapter_manager_mixin").AdapterManagerMixin
    make = named("djl_python.inputs").make_input
    decode = named("djl_python.outputs").Output.binary_decode
    calls = []

    class Service(mixin):  # type: ignore[misc]
        async def add_lora(self, lora_name: str, lora_alias: str, lora_path: str) -> bool:
            calls.append(("add", lora_name, lora_path))
            return True

        async def remove_lora(self, lora_name: str, lora_alias: str) -> None:
            calls.append(("remove", lora_name))

        async def pin_lora(self, lora_name: str, lora_alias: str) -> None:
            raise ValueError("no room to pin")

    service = Service()
    call = make({"name": "a", "src": str(tmp_path)}, [], None)
    result = asyncio.run(service.register_adapter(call))
    assert decode(result.content.values[0]) == {"data": "Adapter a registered"}
    assert calls == [("add", "a", str(tmp_path))]
    pinned = make({"name": "b", "src": str(tmp_path)}, [("pin", b"true")], None)
    assert decode(asyncio.run(service.register_adapter(pinned)).content.values[0])["error"] == "no room to pin"
    assert calls[-1] == ("remove", "b")
    asyncio.run(service.unregister_adapter(call))
    assert service.adapter_registry == {}


def test_chats_become_prompts(named: Any) -> None:
    chats = named("djl_python.chat_completions.chat_utils")

    def template(messages: Any, **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}
    tokenizer = SimpleNamespace(apply_chat_template=template)
    prompt, parameters = chats.parse_chat_completions_request(body, True, tokenizer)
    assert (prompt, parameters["max_new_tokens"]) == ("<user>hi", 3)


def test_a_handler_is_found_in_a_file(named: Any, tmp_path: Path) -> None:
    loader, decorators = named("djl_python.service_loader"), named("djl_python.input_parser")
    (tmp_path / "model.py").write_text(
        "from djl_python.input_parser import input_formatter\n"
        "def handle(inputs): return inputs.get_property('model_dir')\n"
        "@input_formatter\ndef mine(body): return body\n"
    )
    service = loader.load_model_service(str(tmp_path), "model.py", "-1")
    assert service.invoke_handler("handle", named("djl_python").Input()) == str(tmp_path)
    assert loader.get_annotated_function(str(tmp_path), "is_input_formatter").__name__ == "mine"
    assert loader.get_annotated_function(str(tmp_path / "nowhere"), "is_input_formatter") is None
    with pytest.raises(AttributeError):
        decorators.nothing  # noqa: B018


@pytest.mark.slow
def test_a_model_streams_without_a_handler(named: Any) -> None:
    from tiny_models import byte_tokenizer, tiny_model  # they import torch

    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    streaming = named("djl_python.streaming_utils").StreamingUtils
    generate = streaming.get_stream_generator("Accelerate")
    steps = ["".join(part) for part in generate(model, tokenizer, ["abc"], "cpu", max_new_tokens=6)]
    sampled = list(generate(model, tokenizer, ["abc"], "cpu", max_new_tokens=6, temperature=0.7, top_k=5, top_p=0.9))
    streamed = list(streaming.use_hf_default_streamer(model, tokenizer, ["abc"], "cpu", max_new_tokens=6))
    assert 1 <= len(steps) <= 6
    assert 1 <= len(sampled) <= 6
    assert "".join(streamed[1] + streamed[2] if len(streamed) > 2 else []) in "".join(steps)
    assert streamed[0] == ["abc"]


@pytest.mark.parametrize("method", ["get_as_string", "get_as_json"])
def test_an_input_without_content_has_no_text(named: Any, method: str) -> None:
    empty = named("djl_python").Input()
    assert (empty.get_as_bytes(), empty.get_data()) == (None, None)
    with pytest.raises(AttributeError, match=r"no content to decode; look at is_empty\(\) first"):
        getattr(empty, method)()


def test_a_model_is_tested_without_a_server(named: Any, tmp_path: Path) -> None:
    tools = named("djl_python.test_model")
    (tmp_path / "serving.properties").write_text("option.greeting=hello\n")
    (tmp_path / "tested.py").write_text(
        "from djl_python import Output\n"
        "first = {}\n"
        "def handle(inputs):\n"
        "    if inputs.is_empty():\n"
        "        first.update(inputs.get_properties())\n"
        "        return None\n"
        "    output = Output()\n"
        "    for index, item in enumerate(inputs.get_batches()):\n"
        "        result = [first['greeting'], item.get_as_json(), item.get_property('X-MINE')]\n"
        "        output.add_as_json(result, batch_index=index if inputs.is_batch() else None)\n"
        "    return output\n"
    )
    handler = tools.TestHandler("tested.py", str(tmp_path))
    request = tools.create_json_request({"a": 1})
    request.properties = {"x-mine": "2"}  # a plain dict is searched in any case, too
    assert json.loads(tools.extract_output_as_string(handler.inference(request))) == ["hello", {"a": 1}, "2"]
    batch = handler.inference_batch([1, 2], [{"x-mine": "a"}, {}])
    assert [json.loads(value) for value in batch.content.values] == [["hello", 1, "a"], ["hello", 2, None]]
    array = tools.create_numpy_request([named("numpy").array([1, 2])])
    assert array.get_as_numpy()[0].tolist() == [1, 2]
    assert tools.create_request(["{}"], ["x=1"]).get_property("content-type") == "application/json"


def test_a_model_is_tested_from_the_command_line(
    named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from djl_python import Output\nfirst = {}\n"
    code += "def handle(inputs):\n    first.update(inputs.properties) if inputs.is_empty() else None\n"
    code += "def mine(inputs): return Output(message=first['greeting'] + inputs.get_as_string())\n"
    (tmp_path / "by_line.py").write_text(code)
    monkeypatch.setenv("OPTION_GREETING", "hello ")
    command = [
        "test",
        "--model-dir",
        str(tmp_path),
        "--entry-point",
        "by_line.py",
        "--handler",
        "mine",
        "--input",
        "you",
    ]
    monkeypatch.setattr(sys, "argv", command)
    named("djl_python.test_model").run()
    assert '"message": "hello you"' in capsys.readouterr().out


def test_a_handler_calls_the_functions_of_a_model_py(named: Any, tmp_path: Path) -> None:
    handling = named("djl_python.custom_formatter_handling")
    reads = "def input_fn(request_body, content_type): return [request_body, content_type]\n"
    (tmp_path / "model.py").write_text(reads + "async def handle(inputs): 1 / 0\n")
    formatters = handling.CustomFormatterHandler()
    formatters.load_formatters(str(tmp_path))
    request = named("djl_python.test_model").create_text_request("a")
    assert formatters.is_sagemaker_script
    assert formatters.apply_input_formatter(request, content_type="text/plain") == [b"a", "text/plain"]
    service = named("djl_python.custom_handler_service").CustomHandlerService({"model_dir": str(tmp_path)})
    failed = asyncio.run(service.handle(request))
    decode = named("djl_python.outputs").Output.binary_decode
    assert decode(failed.content.values[0])["error"] == "Custom handler failed: division by zero"


def test_the_arguments_of_lmis_commands(named: Any) -> None:
    parser = named("djl_python.arg_parser").ArgParser
    given = "--model-dir /m --sock-type unix --tensor-parallel-degree 2 --no-async-mode"
    worker = parser.python_engine_args().parse_args(given.split())
    assert (worker.model_dir, worker.tensor_parallel_degree, worker.device_id) == ("/m", 2, "-1")
    assert (worker.async_mode, worker.log_level, worker.entry_point) == (False, "info", None)
    tested = parser.test_model_args().parse_args(["--parameters", "a=1", "b=2"])
    assert (tested.handler, tested.input, tested.parameters) == ("handle", ["input.txt"], ["a=1", "b=2"])


def test_a_request_and_an_answer_over_a_socket(named: Any) -> None:
    """The bytes are those between LMI's front end and its worker."""
    inputs, outputs = named("djl_python.inputs"), named("djl_python.outputs")
    front, worker = socket.socketpair()
    with front, worker:
        text = outputs.Output.write_utf8
        sent = bytearray(b"\x00\x01")
        text(sent, "handler")
        text(sent, "mine")
        sent += b"\x00\x02"
        for name in ("data", None):
            text(sent, name)
            sent += b"\x00\x00\x00\x03\x00\xff\x01"
        front.sendall(sent)
        given = inputs.Input()
        given.read(worker)
        assert (given.get_function_name(), given.content.keys) == ("mine", ["data", None])
        assert given.get_as_bytes() == b"\x00\xff\x01"
        outputs.Output(201, "made").add_property("a", 1).add("x").send(worker)
        assert inputs.retrieve_short(front) == 201
        assert [inputs.retrieve_utf8(front), inputs.retrieve_short(front)] == ["made", 1]
        assert [inputs.retrieve_utf8(front) for _ in range(2)] == ["a", "1"]
        assert [inputs.retrieve_short(front), inputs.retrieve_utf8(front)] == [1, None]
        assert inputs.retrieve_buffer(front, inputs.retrieve_int(front)) == b"x"

        def pieces() -> Any:
            yield "ab"
            raise ValueError("in the stream")

        outputs.Output().add_stream_content(pieces(), None).send(worker)
        worker.close()
        head = b"\x00\xc8\x00\x00\x00\x02OK\x00\x00\xff\xff"
        assert inputs.retrieve_buffer(front, len(head)) == head
        assert inputs.retrieve_buffer(front, 7) == b"\x01\x00\x00\x00\x02ab"
        assert inputs.retrieve_buffer(front, 18) == b"\x00\x00\x00\x00\x0din the stream"
        with pytest.raises(ValueError, match="closed after 0 of 4 bytes"):
            inputs.retrieve_int(front)


def test_the_parts_of_an_ndlist(named: Any) -> None:
    parts = named("djl_python.np_util")
    data = parts.set_int(-2) + parts.set_long(2**40) + parts.set_str("é") + parts.set_char("?") + b"\x07ab"
    read, at = [], 0
    for name in ("int", "long", "str", "char", "byte_as_int"):
        value, at = getattr(parts, f"get_{name}")(data, at)
        read.append(value)
    assert (read, parts.get_bytes(data, at, 2)) == ([-2, 2**40, "é", "?", 7], (b"ab", len(data)))


def test_a_request_in_bedrocks_form(named: Any) -> None:
    parse = named("djl_python.three_p.three_p_utils").parse_3p_request
    body = {"prompt": "a", "temperature": 0, "max_gen_len": 3}
    prompt, parameters = parse(body, True, None, "InvokeEndpoint")
    assert (prompt, body, parameters["max_new_tokens"], "do_sample" in parameters) == ("a", {}, 3, False)
    streamed = parse({"prompt": "a"}, True, None, "InvokeEndpointWithResponseStream")[1]
    assert (streamed["stream"], streamed["output_formatter"], streamed["do_sample"]) == (True, "3p_stream", True)


def test_caches_of_lmcache(named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = named("djl_python.lmcache_utils")
    free = sizes.get_available_cpu_memory()
    assert sizes.calculate_cpu_cache_size({"tensor_parallel_degree": "2"}, 0) == pytest.approx(0.4 * free, rel=0.2)
    assert sizes.calculate_cpu_cache_size({}, free) == 0
    with pytest.raises(RuntimeError, match="has no weights"):
        sizes.get_model_size_gb(str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(bytes(2**20))
    (tmp_path / "b.bin").write_bytes(bytes(2**20))
    assert sizes.get_model_size_gb(str(tmp_path)) == 2**-10
    assert sizes.apply_lmcache_auto_config(str(tmp_path), {"a": "b"}) == {"a": "b"}
    asked = {"lmcache_auto_config": "true"}
    for refused in ({"enable_expert_parallel": "true"}, {"lmcache_config_file": "f"}):
        with pytest.raises(RuntimeError, match=next(iter(refused))):
            sizes.apply_lmcache_auto_config(str(tmp_path), asked | refused)
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "1")  # so that what the call sets ends with the test
    for name in ("LMCACHE_MAX_LOCAL_DISK_SIZE", "LMCACHE_LOCAL_DISK", "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", "")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    told = sizes.apply_lmcache_auto_config(str(tmp_path), asked)
    assert json.loads(told["kv_transfer_config"])["kv_connector"] == "LMCacheConnectorV1"
    assert os.environ["LMCACHE_LOCAL_DISK"] == "file:///tmp/lmcache/"


def test_properties_of_the_engines(named: Any) -> None:
    hugging_face = named("djl_python.properties_manager.hf_properties")
    made = hugging_face.HuggingFaceProperties
    common = {"model_dir": "/m", "rolling_batch": "disable"}
    told = made(**common, device_id="1", revision="r", trust_remote_code="true", dtype="auto")
    assert (told.device, told.model_id_or_path) == ("cuda:1", "/m")
    assert told.kwargs == {"trust_remote_code": True, "revision": "r", "torch_dtype": "auto"}
    mapped = made(**common, device_id="1", device_map="auto", load_in_8bit="true")
    assert (mapped.device, mapped.quantize, mapped.kwargs["load_in_8bit"]) == (None, "bitsandbytes8", True)
    assert made(model_dir="/m", rolling_batch="vllm", quantize="bitsandbytes8").quantize == "bitsandbytes"
    with pytest.raises(ValueError, match=r"set option\.device_map=auto"):
        made(**common, quantize="bitsandbytes4")
    with pytest.raises(ValueError, match="dtype 'float' is not allowed"):
        hugging_face.get_torch_dtype_from_str("float")
    vllm = named("djl_python.properties_manager.vllm_rb_properties")
    given = vllm.VllmRbProperties(**common, engine="Python", dtype="bf16", quantization="awq", seed="7")
    assert (given.dtype, given.quantize, given.get_additional_vllm_engine_args()["seed"]) == ("bfloat16", "awq", "7")
    with pytest.raises(NotImplementedError, match=r"set option\.rolling_batch=vllm"):
        given.get_engine_args()
    arguments = vllm.construct_vllm_args_list({"a": "true", "b": False, "c": 1, "d": [2, 3], "e": []})
    assert arguments == ["--a", "--no-b", "--c", "1", "--d", "2", "3"]
    trt = named("djl_python.properties_manager.trt_properties").TensorRtLlmProperties
    assert trt(model_dir="/m", rolling_batch="TRTLLM").rolling_batch.value == "trtllm"


@pytest.mark.slow
def test_data_types_are_torchs(named: Any) -> None:
    torch = pytest.importorskip("torch")
    dtype = named("djl_python.properties_manager.hf_properties").get_torch_dtype_from_str
    assert [dtype(name) for name in ("fp16", "bf16", None)] == [torch.float16, torch.bfloat16, None]


def test_an_adapter_brings_formatters(named: Any, tmp_path: Path) -> None:
    mixin = named("djl_python.adapter_formatter_mixin").AdapterFormatterMixin
    make, decode = named("djl_python.inputs").make_input, named("djl_python.outputs").Output.binary_decode
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    formatter = "from djl_python.output_formatter import output_formatter\n@output_formatter\n"
    (tmp_path / "good/model.py").write_text(formatter + "def mine(text): return text.upper()\n")
    (tmp_path / "bad/model.py").write_text("1 / 0\n")

    class Service(mixin):  # type: ignore[misc]
        async def add_lora(self, *described: str) -> bool:
            return True

        async def remove_lora(self, *described: str) -> None: ...

        async def pin_lora(self, *described: str) -> None: ...

    async def streamed(name: str | None) -> list[str]:
        async def pieces() -> Any:
            yield "a"

        return [item async for item in service.apply_output_formatter_streaming_raw(pieces(), name)]

    service = Service()
    register = {name: make({"name": name, "src": str(tmp_path / name)}, [], None) for name in ("good", "bad")}
    assert "data" in decode(asyncio.run(service.register_adapter(register["good"])).content.values[0])
    refused = decode(asyncio.run(service.register_adapter(register["bad"])).content.values[0])
    assert (refused["code"], "division by zero" in refused["error"]) == ("424", True)
    assert list(service.adapter_registry) == ["good"]
    assert [service.apply_output_formatter("a", name) for name in ("good", "other", None)] == ["A", "a", "a"]
    assert [asyncio.run(streamed(name)) for name in ("good", None)] == [["A"], ["a"]]
    asyncio.run(service.unregister_adapter(register["good"]))
    assert service.apply_output_formatter("a", "good") == "a"


def test_telemetry_and_events_are_logged(
    named: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    telemetry = named("djl_python.telemetry")
    manager = telemetry.TelemetryManager()
    data = {"mean_acceptance": 2.0, "acceptance_history_len": 3}
    with caplog.at_level("INFO"):
        manager.record_speculative(data)
        assert caplog.text == ""
        manager.speculative_sent_time -= telemetry.SPECULATIVE_FREQUENCY_SEC + 1
        manager.record_speculative({**data, "mean_acceptance": 4.0})
        assert "ModelServerTelemetry: Speculative Decoding Mean Acceptance: 3.0 rate" in caplog.text
        events = named("djl_python.aws.cloud_watch").CloudWatch()
        events.client = None
        events.post("created")
        assert "created: 1" in caplog.text
        events.client = SimpleNamespace(put_metric_data=lambda **_: 1 / 0)
        events.post("lost")
    assert "lost is not counted in CloudWatch: division by zero" in caplog.text


def test_a_chat_of_texts(named: Any) -> None:
    parse = named("djl_python.lmi_trtllm.trtllm_async_service").parse_chat_message_content
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]
    assert (parse({"role": "user"}), parse({"role": "user", "content": "a"})[0]["content"]) == ([], "a")
    with pytest.raises(NotImplementedError, match="image_url"):
        parse({"role": "user", "content": [{"type": "image_url"}]})


@pytest.fixture
def images() -> Iterator[str]:
    """Serve a picture at /image.png, and a way to it by another name at /moved."""

    class Images(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/moved" else 200)
            if self.path == "/moved":
                self.send_header("location", f"http://localhost:{self.server.server_address[1]}/image.png")
            self.end_headers()
            self.wfile.write(PIXEL)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Images)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(60)


def test_code_fetches_images_from_public_addresses_alone(
    named: Any, images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.1 counts as public for a part of the test, as nothing else can be reached."""
    from lmi_server.media import public_addresses

    utils = named("djl_python.multimodal.utils")
    url = f"{images}/image.png"
    assert utils.fetch_image("data:image/png;base64," + base64.b64encode(PIXEL).decode()).size == (1, 1)
    for fetch in (utils.fetch_image, utils.fetch_image_from_url, utils.encode_image_base64_from_url):
        with pytest.raises(ValueError, match=r"is not public; .* option\.allow_private_media=true"):
            fetch(url)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy would connect in our place
    with pytest.raises(ValueError, match="is not public"):
        utils.fetch_image(url)
    monkeypatch.delenv("http_proxy")
    seen = []
    monkeypatch.setattr(public_addresses, "is_public", lambda address: seen.append(address) or len(seen) < 3)
    assert utils.fetch_image(url).size == (1, 1)
    with pytest.raises(ValueError, match="is not public"):
        utils.fetch_image(f"{images}/moved")  # the second of its connections
    monkeypatch.undo()
    monkeypatch.setattr(public_addresses, "_allows_private", True)
    assert utils.fetch_image(f"{images}/moved").size == (1, 1)

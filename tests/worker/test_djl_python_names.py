"""Every public name of djl_python has the signature that LMI's has, and works without LMI's engines."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

from lmi_server import worker

COMPAT = Path(worker.__file__).parent.parent / "compat"
TABLE: Mapping[str, Mapping[str, str]] = json.loads((ROOT / "tests/data/djl_python_signatures.json").read_text())
"""By module and name the signature of LMI's function, as Python writes it; "" for classes and constants."""


@pytest.fixture(scope="module")
def named() -> Iterator[Any]:
    """Import a module of djl_python as a worker does."""
    sys.path.insert(0, str(COMPAT))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(COMPAT))
        for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
            del sys.modules[name]


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
    assert [told["last"] for told in first] == ["False", "False"]
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
    told = asyncio.run(service.register_adapter(call))
    assert decode(told.content.values[0]) == {"data": "Adapter a registered"}
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
        "        told = [first['greeting'], item.get_as_json(), item.get_property('X-MINE')]\n"
        "        output.add_as_json(told, batch_index=index if inputs.is_batch() else None)\n"
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

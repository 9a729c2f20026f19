"""Keeps LoRA adapters itself, as code for LMI does: the file `greeting` of an adapter is what it answers with."""

import os

from djl_python import Input, Output
from djl_python.async_utils import create_non_stream_output

greetings = {"": "hello"}
calls = []


def register_adapter(inputs: Input) -> Output:
    name, src = inputs.get_property("name"), inputs.get_property("src")
    if name == "exit":
        os._exit(7)
    if name == "full":
        return Output(507, "no free slots")
    path = os.path.join(src, "greeting")
    if not os.path.exists(path):
        raise ValueError(f"no greeting in {src}")
    with open(path) as file:
        greetings[name] = file.read()
    remember(inputs)
    return Output(message=f"{inputs.get_property('alias')} is there")


def update_adapter(inputs: Input) -> Output:
    if inputs.contains_key("refuse"):
        return Output().error("it stays as it is", message="update_adapter_error")
    greetings[inputs.get_property("name")] += "!"
    remember(inputs)
    return None


def unregister_adapter(inputs: Input) -> Output:
    if inputs.get_property("name") == "kept":
        return Output(424, "kept adapters stay")
    del greetings[inputs.get_property("name")]
    remember(inputs)
    return Output()


def remember(inputs):
    options = {key: inputs.get_as_string(key) for key in inputs.get_content().get_keys()}
    calls.append([inputs.get_function_name(), inputs.get_property("name"), options])


def adapter_of(inputs):
    return inputs.get_as_string("adapter") if inputs.contains_key("adapter") else ""


def handle(inputs: Input) -> Output:
    if inputs.is_empty():
        return None
    if inputs.is_batch():
        output = Output()
        for index, one in enumerate(inputs.get_batches()):
            output.add(greetings[adapter_of(one)], batch_index=index)
        return output
    if inputs.get_as_string() == "calls":
        return Output().add_as_json(calls)
    return Output().add(greetings[adapter_of(inputs)])


async def handle_async(inputs: Input) -> Output:
    output = handle(inputs)
    return output and create_non_stream_output(output.content.values[0].decode())


def handle_steps(inputs: Input) -> Output:
    if inputs.is_empty():
        return None
    output = Output()
    for one in inputs.get_batches():
        text = handle(one).content.values[0].decode()
        output.add(Output.binary_encode({"data": text, "last": True}))
    return output

"""Formatters for a built-in handler, in LMI's newer form. The prompt may name a fault."""

from djl_python import Input
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
from djl_python.request_io import TextInput


class Greeting(TextInput):
    greeting = ""


@input_formatter
def parse(request: Input, **kwargs) -> Greeting:
    body = request.get_as_json()
    if body["question"] == "raise":
        raise KeyError("no such question")
    made = Greeting(input_text=body["question"], parameters={"max_new_tokens": 3, "stream": body.get("lines", False)})
    made.greeting = request.get_property("X-Greeting") or "hello"
    return made


@output_formatter
def write(output: TextGenerationOutput) -> str:
    sequence = output.best_sequence
    if not output.input.parameters["stream"]:
        if not output.finished:
            return ""
        if output.input.input_text == "break late":
            raise RuntimeError("no answer to that")
        if output.input.input_text == "number":
            return str(output.request_id)
        text = "".join(token.text for token in sequence.tokens)
        return f"{output.input.greeting}{text} ({sequence.finish_reason})"
    token, index, first, last = sequence.get_next_token()
    if token.text == " late" and index:
        raise RuntimeError("no answer to that")
    return f"{index}{token.text}{' first' if first else ''}{' last' if last else ''}\n"

"""Output formatters for LMI's asynchronous service, which hands over the events of a stream as texts."""

import json

from djl_python.output_formatter import output_formatter


@output_formatter
def mark(answer, **kwargs):
    if not isinstance(answer, str):
        answer.processed_by = "mine"
        return answer
    if answer == "data: [DONE]\n\n":
        return answer.strip() + "\n"
    event = json.loads(answer.removeprefix("data: "))
    if event["choices"] and event["choices"][0].get("text") == " broken":
        raise RuntimeError("no such event")
    return f"data: {json.dumps({**event, 'processed_by': 'mine'})}\n"


def replace(answer):
    return {"is_text": isinstance(answer, str), "has_choices": hasattr(answer, "choices")}

"""An input formatter that takes and returns the body, as those for LMI's vLLM handler do."""

from djl_python.input_parser import init_handler, input_formatter


@init_handler
def load(model_dir):
    raise AssertionError("nobody calls this")


@input_formatter
def read(payload: dict, tokenizer=None, **kwargs) -> dict:
    if "ask" not in payload:
        return payload
    if payload["ask"] == "wrong":
        return ["no", "body"]
    if "model" in payload:
        return {"model": payload["model"], "prompt": payload["ask"], "max_tokens": 2}
    return {"inputs": payload["ask"], "parameters": {"max_new_tokens": 2}}

"""Adapters of a transformers model over HTTP: what peft generates, for several of them at once on two workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_helpers import Server, running

pytestmark = pytest.mark.slow

PROMPTS = ["Hello there", "x", "a longer prompt with some more words in it", "1 2 3 4"]


class Served:
    """A server of a tiny Llama, and peft's own models to compare with; "" is the model without adapter."""

    def __init__(self, server: Server, directory: Path) -> None:
        from tiny_models import byte_tokenizer, tiny_model

        self.server = server
        self._model = tiny_model("llama")
        self._directory = directory
        self._tokenizer = byte_tokenizer()

    def make(self, name: str, seed: int, **config: Any) -> Path:
        from adapter_helpers import save_adapter

        return save_adapter(self._model, self._directory / name, seed, **config)

    def expected(self, name: str, prompt: str, length: int, **parameters: Any) -> str:
        from adapter_helpers import with_adapter
        from rolling_batch_helpers import generated

        model = with_adapter(self._model, self._directory / name) if name else self._model
        tokens = generated(model, self._tokenizer.encode(prompt), length, **parameters)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def only(self, letters: str) -> Callable[..., list[int]]:
        """Return what has `generate` of transformers choose among the tokens of these letters."""
        tokens = self._tokenizer.encode(letters)
        return lambda *_: tokens

    def answer(self, name: str, prompt: str, length: int, **parameters: Any) -> str:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": length, **parameters}, "adapters": name}
        return str(self.server.http.post("/invocations", json=body).json()["generated_text"])

    def compare(self, names: list[str], length: int) -> None:
        wanted = [(name, prompt, length) for prompt in PROMPTS for name in names]
        with ThreadPoolExecutor(len(wanted)) as pool:
            answers = list(pool.map(lambda each: self.answer(*each), wanted))
        assert answers == [self.expected(*each) for each in wanted]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from adapter_helpers import save_adapter
    from tiny_models import saved_model, tiny_model

    directory = tmp_path_factory.mktemp("tiny") / "model"
    saved_model(tiny_model("llama"), directory)
    keys = ["option.enable_lora=true", "option.dtype=fp32", "minWorkers=2", "maxWorkers=2", "option.threads=1"]
    (directory / "serving.properties").write_text("\n".join([*keys, "option.parallel_loading=true"]))
    save_adapter(tiny_model("llama"), directory / "adapters" / "beside", seed=4)
    with running(directory, libraries="transformers", workers=2) as server:
        yield Served(server, directory / "adapters")


def test_adapters_share_the_batch_and_are_replaced(served: Served) -> None:
    source = served.make("french", seed=1)
    served.make("german", seed=2, r=8, target_modules=["q_proj", "v_proj"])
    for name, preload in (("french", "true"), ("german", "false")):
        given = {"name": name, "src": f"adapters/{name}", "preload": preload}
        assert served.server.http.post("/adapters", params=given).status_code == 200
    served.compare(["french", "", "german", "beside"], length=9)
    assert served.expected("french", "x", 9) != served.expected("", "x", 9)
    digits = served.only("0123456789")
    constrained = [served.expected(name, "x", 9, prefix_allowed_tokens_fn=digits) for name in ("french", "")]
    assert [served.answer(name, "x", 9, guided_regex="[0-9]{9}") for name in ("french", "")] == constrained
    assert constrained[0] != constrained[1]
    served.make("french", seed=3)
    assert served.server.http.post("/adapters/french/update", params={"src": str(source)}).status_code == 200
    served.compare(["beside", "french", ""], length=7)
    assert served.server.http.delete("/adapters/french").status_code == 200
    served.compare(["beside", ""], length=3)


def test_an_adapters_own_code_gets_the_tokenizer_of_the_model(served: Served) -> None:
    source = served.make("counting", seed=5)
    (source / "model.py").write_text(
        "from djl_python.input_parser import input_formatter\n"
        "@input_formatter\n"
        "def read(body: dict, tokenizer, **kwargs) -> dict:\n"
        "    count = len(tokenizer.encode(body['inputs']))\n"
        "    return {**body, 'inputs': f\"{count} {body['inputs']}\"}\n"
    )
    assert served.server.http.post("/adapters", params={"name": "counting", "src": str(source)}).status_code == 200
    assert served.answer("counting", "abc", 6) == served.expected("counting", "3 abc", 6)


def test_what_the_handler_does_not_support_is_refused_by_name(served: Served) -> None:
    source = served.make("dora", seed=1)
    file = source / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    reply = served.server.http.post("/adapters", params={"name": "dora", "src": str(source)})
    assert reply.status_code == 424
    assert "use_dora = True is not supported" in reply.json()["message"]
    assert served.server.http.get("/adapters/dora").status_code == 404

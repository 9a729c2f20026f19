"""`lmi-server serve model.yaml`: a model file of RayLLM on one machine, with its prompt format and its stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from product_helpers import Server, running

pytestmark = pytest.mark.slow
pytest.importorskip("yaml")

MODEL_FILE = """\
deployment_config:
  autoscaling_config: {{min_replicas: 1, max_replicas: 4}}
  max_concurrent_queries: 4
engine_config:
  model_id: team/smol
  hf_model_id: {weights}
  max_total_tokens: 512
  generation:
    prompt_format:
      system: "{{instruction}}\\n"
      assistant: "A: {{instruction}}\\n"
      trailing_assistant: "A:"
      user: "Q: {{instruction}}\\n"
      default_system_message: "Short answers."
    stopping_sequences: ["Paris"]
"""


@pytest.fixture(scope="module")
def server(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    path = home / "smol.yaml"
    path.write_text(MODEL_FILE.format(weights=demo_model_dir))
    variables = {**os.environ, "SERVING_DOWNLOAD_DIR": str(home)}
    with running(Server(path, variables=variables, libraries="transformers")) as server:
        yield server


def test_the_file_gives_the_model_its_name_and_its_context(server: Server) -> None:
    listed = server.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("team--smol", 512), ("team/smol", 512)]
    assert server.http.get("/models/team--smol").status_code == 200


def test_the_prompt_format_makes_the_prompt_of_a_chat(server: Server) -> None:
    messages = [{"role": "user", "content": " Hello? "}, {"role": "system", "content": "Be kind."}]
    tokens = server.http.post("/tokenize", json={"model": "team/smol", "messages": messages}).json()["tokens"]
    prompt = server.http.post("/detokenize", json={"model": "team/smol", "tokens": tokens}).json()["prompt"]
    assert prompt == "Be kind.\nQ: Hello?\nA:"
    twice = [{"role": "system", "content": "a"}, *messages]
    refused = server.http.post("/v1/chat/completions", json={"model": "team/smol", "messages": twice})
    assert refused.status_code in (400, 424)
    assert "only one system message is allowed" in refused.text


def test_the_stopping_sequences_end_outputs_beside_those_of_the_request(server: Server) -> None:
    """The model goes on with " Paris." if nothing stops it."""
    for own in ([], ["never written"]):
        parameters = {"max_new_tokens": 8, "details": True, "stop_sequences": own}
        body = {"inputs": "The capital of France is", "parameters": parameters}
        answer = server.http.post("/invocations", json=body).json()
        assert (answer["generated_text"].strip(), answer["details"]["finish_reason"]) == ("", "stop_sequence")

"""The code of docs/clients.md as it stands, each client in the version that is installed, against the real server.

A client that is not installed is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environment import PYTHON, ClientScripts, installed
from paths import ROOT
from product_helpers import Server, serving

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
_CODE = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
_PACKAGE = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
# What the first line of a script imports names its client. Each prints what the server answered.
CLIENTS = {
    "openai": "Paris",
    "anthropic": "Paris",
    "huggingface_hub": "Paris",
    "langchain_openai": "Paris",
    "langchain_huggingface": "Paris",
    "langchain_aws": "Paris",
    "litellm": "Paris",
    "instructor": "country=",
    "pydantic_ai": "country=",
    "tritonclient": "Paris",
    "boto3": "Paris",
}


def scripts() -> dict[str, str]:
    """Return the Python code of the page, by the client that it imports."""
    found = {}
    for match in _CODE.finditer(PAGE):
        code = textwrap.dedent(match[0]).strip()
        imported = _PACKAGE.findall(code)
        client = next(
            (name for name in CLIENTS if name in imported and (name != "openai" or imported == ["openai"])), ""
        )
        if client:
            found[client] = code
    return found


SCRIPTS = scripts()


# A prompt that is too long for the first model goes to the second, which LiteLLM stands in for here.
FALLBACK = """
import litellm

litellm.suppress_debug_info = True
long = {"max_tokens": 4, "messages": [{"role": "user", "content": "word " * 9000}]}
own = {"openai": "http://127.0.0.1:8080/v1", "anthropic": "http://127.0.0.1:8080"}
for provider, address in own.items():
    here = {"model": f"{provider}/smollm2_135m_instruct", "api_base": address, "api_key": "none"}
    try:
        litellm.completion(**here, **long)
    except litellm.ContextWindowExceededError:
        print(provider, "raises it")
    there = {"model": "openai/larger", "api_key": "none", "mock_response": "I have room."}
    router = litellm.Router(
        [{"model_name": "first", "litellm_params": here}, {"model_name": "second", "litellm_params": there}],
        context_window_fallbacks=[{"first": ["second"]}],
        num_retries=0,
    )
    print(router.completion(model="first", **long).choices[0].message.content)
"""
# Its providers for SageMaker endpoints read other bodies, and a stream of Amazon's in events.
SAGEMAKER = """
import litellm

litellm.suppress_debug_info = True
address = "http://127.0.0.1:8080/endpoints/any/invocations"
keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "aws_region_name": "us-east-1"}
texts = {"sagemaker": "The capital of France is", "sagemaker_chat": "What is the capital of France?"}
for provider, text in texts.items():
    asked = {"model": f"{provider}/any", "messages": [{"role": "user", "content": text}], "max_tokens": 16, **keys}
    asked["temperature"] = 0.01
    print(repr(litellm.completion(sagemaker_base_url=address, **asked).choices[0].message.content))
    stream = litellm.completion(sagemaker_base_url=f"{address}-response-stream", stream=True, **asked)
    print(repr("".join(chunk.choices[0].delta.content or "" for chunk in stream)))
"""
# What the scripts below share: each asks for a value of the class City, and prints the types of what it gets.
CITY = """
from pydantic import BaseModel


class City(BaseModel):
    name: str
    country: str


URL, MODEL, TEXT = "http://127.0.0.1:8080/v1", "smollm2_135m_instruct", "Paris is the capital of France."
"""
OPENAI_CLASSES = f"""
{CITY}
from openai import OpenAI

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
asked = {{"model": MODEL, "messages": [{{"role": "user", "content": TEXT}}], "max_tokens": 100, "temperature": 0}}
print(type(client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed).__name__)
with client.chat.completions.stream(**asked, response_format=City) as stream:
    print(type(stream.get_final_completion().choices[0].message.parsed).__name__)
answer = client.responses.parse(model=MODEL, input=TEXT, text_format=City, max_output_tokens=100, temperature=0)
print(type(answer.output_parsed).__name__)
"""
ANTHROPIC_CLASSES = f"""
{CITY}
from anthropic import Anthropic

client = Anthropic(base_url="http://127.0.0.1:8080", api_key="none", max_retries=0)
messages = [{{"role": "user", "content": TEXT}}]
asked = {{"model": MODEL, "max_tokens": 100, "messages": messages, "extra_body": {{"temperature": 0}}}}
print(type(client.messages.parse(**asked, output_format=City).parsed_output).__name__)
"""
LANGCHAIN_CLASSES = f"""
{CITY}
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_completion_tokens=100, temperature=0, max_retries=0)
chain = model.with_structured_output(City, method="json_schema")
print(type(chain.invoke(TEXT)).__name__)
print(type(list(chain.stream(TEXT))[-1]).__name__)
"""
# The command `lm_eval` without the 14,000 tasks that it brings: to read them takes most of its time.
LM_EVAL = """
import functools
import lm_eval.tasks

lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
from lm_eval.__main__ import cli_evaluate

cli_evaluate()
"""
CLASSES = {"openai": OPENAI_CLASSES, "anthropic": ANTHROPIC_CLASSES, "langchain_openai": LANGCHAIN_CLASSES}


@pytest.fixture(scope="module")
def server(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"kv_cache_memory_gb": "0.5", "served_model_name": "smollm2_135m_instruct"}
    with serving(tmp_path_factory.mktemp("served"), demo_model_dir, libraries="transformers", **settings) as server:
        yield server


@pytest.fixture(scope="module")
def ran(server: Server) -> ClientScripts:
    """Run all scripts, with the address of the server in place of the page's."""
    scripts = {client: (client, code) for client, code in SCRIPTS.items()}
    scripts |= {"falls back": ("litellm", FALLBACK), "sagemaker": ("litellm", SAGEMAKER)}
    scripts |= {f"{client} classes": (client, code) for client, code in CLASSES.items()}
    here = server.url.removeprefix("http://")
    return ClientScripts(
        {name: (client, code.replace("127.0.0.1:8080", here)) for name, (client, code) in scripts.items()}
    )


def test_the_page_has_each_client() -> None:
    assert sorted(SCRIPTS) == sorted(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works_as_the_page_says(ran: ClientScripts, client: str) -> None:
    assert CLIENTS[client] in ran.output(client)


def test_langchain_reads_a_sagemaker_endpoint_at_once_and_as_a_stream(ran: ClientScripts) -> None:
    assert ran.output("langchain_aws").count("Paris") == 2


def test_litellm_falls_back_if_a_prompt_is_too_long(ran: ClientScripts) -> None:
    lines = ran.output("falls back").splitlines()
    assert lines == ["openai raises it", "I have room.", "anthropic raises it", "I have room."]


def test_litellm_talks_as_to_a_sagemaker_endpoint(ran: ClientScripts) -> None:
    assert ["Paris" in line for line in ran.output("sagemaker").splitlines()] == [True] * 4


@pytest.mark.parametrize(("client", "times"), [("openai", 3), ("anthropic", 1), ("langchain_openai", 2)])
def test_a_client_gets_values_of_the_class_that_it_asks_for(ran: ClientScripts, client: str, times: int) -> None:
    assert ran.output(f"{client} classes").split() == ["City"] * times


def test_lm_eval(server: Server, demo_model_dir: Path) -> None:
    if not installed({"lm_eval"}):
        pytest.skip("lm_eval is not installed; it is in the extra clients")
    arguments = {
        "model": "smollm2_135m_instruct",
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": "4",
        "tokenizer": str(demo_model_dir),
    }
    tasks = ["--tasks", "little_choice,little_text", "--include_path", str(ROOT / "tests" / "data" / "lm_eval")]
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [PYTHON, "-c", LM_EVAL, "--model", "local-completions", *tasks, "--model_args", model_args]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"little_choice.*\|acc +\|↑ +\| *0\.750*\|", ran.stdout), ran.stdout

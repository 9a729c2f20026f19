"""Requests to the demo model on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from product_helpers import Server

TOKENS = 32
TOPICS = ("rivers", "engines", "bread", "the moon", "chess", "whales", "paper", "steel")
PROMPTS = [f"Number {index}: write what a child should know about {topic}" for index, topic in enumerate(TOPICS)]


def generated(server: Server, prompts: list[str], **parameters: Any) -> list[str]:
    """Return the greedy answers to prompts that are sent together."""
    parameters = {"max_new_tokens": TOKENS, "ignore_eos": True, **parameters}

    def ask(prompt: str) -> str:
        answer = server.http.post("/invocations", json={"inputs": prompt, "parameters": parameters})
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["generated_text"]
        return text

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def capital_of_france(server: Server) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content

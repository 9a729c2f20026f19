"""vLLM's scores: one per pair, and documents by relevance."""

from __future__ import annotations

import json

from lmi_server.dialects.vllm.scores import rerank_body, score_body


def test_scores_keep_the_order_of_the_pairs() -> None:
    answer = json.loads(score_body("m", [0.5, -1.0], 9))
    assert [(row["index"], row["score"]) for row in answer["data"]] == [(0, 0.5), (1, -1.0)]
    assert (answer["model"], answer["usage"]["total_tokens"]) == ("m", 9)


def test_documents_come_by_relevance() -> None:
    image = {"content": [{"type": "image_url"}]}
    answer = json.loads(rerank_body("m", ["a", image, "c"], [0.1, 0.9, 0.9], 0, 9))
    assert [row["index"] for row in answer["results"]] == [1, 2, 0]
    assert answer["results"][0]["document"] == {"text": None, "multi_modal": image["content"]}
    assert answer["results"][2] == {
        "index": 0,
        "document": {"text": "a", "multi_modal": None},
        "relevance_score": 0.1,
    }


def test_only_the_most_relevant_documents() -> None:
    answer = json.loads(rerank_body("m", ["a", "b", "c"], [0.1, 0.2, 0.3], 2, 9))
    assert [row["index"] for row in answer["results"]] == [2, 1]
    assert [row["document"]["text"] for row in json.loads(rerank_body("m", "a", [0.1], 0, 9))["results"]] == ["a"]

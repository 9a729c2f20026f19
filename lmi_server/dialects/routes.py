"""The routes of requests. The front end maps a path to one of them and sends it as `Input.route`."""

from __future__ import annotations

INVOCATIONS = "invocations"
PREDICTIONS = "predictions"
COMPLETIONS = "completions"
CHAT_COMPLETIONS = "chat/completions"
RESPONSES = "responses"
EMBEDDINGS = "embeddings"
SCORE = "score"
RERANK = "rerank"
TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"
TGI = "tgi"
GENERATE = "generate"
GENERATE_STREAM = "generate_stream"

LMI_ROUTES = frozenset({INVOCATIONS, PREDICTIONS})
"""The routes that take a body of any dialect, and whose errors have LMI's form."""

ANY_MODEL = frozenset({"lmi", "tgi", "dummy"})
"""What clients send as `model` to a server with one model: LMI's examples, and those of text-generation-inference."""

POOLING_ROUTES = frozenset({EMBEDDINGS, SCORE, RERANK})
"""The routes for vectors and scores of texts; a model that generates text serves none of them."""

TOKEN_ROUTES = frozenset({TOKENIZE, DETOKENIZE})
"""The routes between text and token ids, which generate nothing."""

TGI_ROUTES = frozenset({TGI, GENERATE, GENERATE_STREAM})
"""text-generation-inference's own paths: `/`, /generate and /generate_stream."""

OPENAI_ROUTES = frozenset({COMPLETIONS, CHAT_COMPLETIONS, RESPONSES}) | POOLING_ROUTES | TOKEN_ROUTES
"""The routes of OpenAI's API and of vLLM's additions to it; their errors have OpenAI's form."""

"""The routes of requests. The front end maps a path to one of them and sends it as `Input.route`.

Optional dialects have routes of their own.
"""

from __future__ import annotations

INVOCATIONS = "invocations"
PREDICTIONS = "predictions"
COMPLETIONS = "completions"
CHAT_COMPLETIONS = "chat/completions"
RESPONSES = "responses"
EMBEDDINGS = "embeddings"
SCORE = "score"
RERANK = "rerank"
IMAGES_GENERATIONS = "images/generations"
IMAGES_EDITS = "images/edits"
IMAGES_VARIATIONS = "images/variations"
AUDIO_TRANSCRIPTIONS = "audio/transcriptions"
AUDIO_TRANSLATIONS = "audio/translations"
TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"
TGI = "tgi"
GENERATE = "generate"
GENERATE_STREAM = "generate_stream"

LMI_ROUTES = frozenset({INVOCATIONS, PREDICTIONS})
"""The routes that take a body of any dialect, and whose errors have LMI's form."""

ANY_MODEL = frozenset({"lmi", "tgi", "dummy"})
"""What clients send as `model` to a server with one model: the examples of LMI and of text-generation-inference."""

_SCHEMES = ("http://", "https://")

POOLING_ROUTES = frozenset({EMBEDDINGS, SCORE, RERANK})
"""The routes for vectors and scores of texts; a model that generates text serves none of them."""

IMAGE_ROUTES = frozenset({IMAGES_GENERATIONS, IMAGES_EDITS, IMAGES_VARIATIONS})
"""The routes for images; only a model that makes images serves them."""

AUDIO_ROUTES = frozenset({AUDIO_TRANSCRIPTIONS, AUDIO_TRANSLATIONS})
"""The routes for speech; only a model that recognizes speech serves them."""

TOKEN_ROUTES = frozenset({TOKENIZE, DETOKENIZE})
"""The routes that only read tokens, and generate nothing; optional dialects have more (`OptionalDialect.counts`)."""

TGI_ROUTES = frozenset({TGI, GENERATE, GENERATE_STREAM})
"""text-generation-inference's own paths: `/`, /generate and /generate_stream."""

OPENAI_ROUTES = (
    frozenset({COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, TOKENIZE, DETOKENIZE})
    | POOLING_ROUTES
    | IMAGE_ROUTES
    | AUDIO_ROUTES
)
"""The routes of OpenAI's API and of vLLM's additions to it; their errors have OpenAI's form."""


def means_any_model(name: str) -> bool:
    """Return whether clients that know no name of the model send `name`: a word of `ANY_MODEL`, or the server's URL."""
    return name in ANY_MODEL or is_address(name)


def is_address(name: str) -> bool:
    """Return whether `name` is a URL, as clients send it that take the address of the server for its model."""
    return name[:8].lower().startswith(_SCHEMES)

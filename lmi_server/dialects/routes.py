"""The routes of requests. The front end maps a path to one of them and sends it as `Input.route`."""

from __future__ import annotations

INVOCATIONS = "invocations"
PREDICTIONS = "predictions"
COMPLETIONS = "completions"
CHAT_COMPLETIONS = "chat/completions"
RESPONSES = "responses"
MESSAGES = "messages"
COUNT_TOKENS = "messages/count_tokens"
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
INFER = "v2/infer"
V2_GENERATE = "v2/generate"
V2_GENERATE_STREAM = "v2/generate_stream"

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

TOKEN_ROUTES = frozenset({TOKENIZE, DETOKENIZE, COUNT_TOKENS})
"""The routes that only read or count tokens, and generate nothing."""

TGI_ROUTES = frozenset({TGI, GENERATE, GENERATE_STREAM})
"""text-generation-inference's own paths: `/`, /generate and /generate_stream."""

KSERVE_ROUTES = frozenset({INFER, V2_GENERATE, V2_GENERATE_STREAM})
"""The routes of the Open Inference Protocol (KServe v2), /v2/models/{model}/infer and its generate extension."""

OPENAI_ROUTES = (
    frozenset({COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, TOKENIZE, DETOKENIZE})
    | POOLING_ROUTES
    | IMAGE_ROUTES
    | AUDIO_ROUTES
)
"""The routes of OpenAI's API and of vLLM's additions to it; their errors have OpenAI's form."""

MODEL_IN_BODY = OPENAI_ROUTES | {MESSAGES, COUNT_TOKENS}
"""The routes whose bodies name the model; one that is not served is refused."""


def means_any_model(name: str) -> bool:
    """Return whether clients that know no name of the model send `name`: a word of `ANY_MODEL`, or the server's URL."""
    return name in ANY_MODEL or is_address(name)


def is_address(name: str) -> bool:
    """Return whether `name` is a URL, as clients send it that take the address of the server for its model."""
    return name[:8].lower().startswith(_SCHEMES)

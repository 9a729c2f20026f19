"""OpenAI's dialect: completions, chats, responses, embeddings and images, with the parameters that vLLM adds.

On /invocations the same bodies are served as LMI serves them: `option.output_formatter` may choose the form of a chat's
answer, and a `model` that is not served causes only a warning.

    request.py                          the fields that the paths share
    messages.py                         messages and tools of a chat
    completions.py                      /v1/completions: request and answer
    chat.py, chat_answer.py             /v1/chat/completions
    responses.py, responses_answer.py   /v1/responses
    embeddings.py                       /v1/embeddings
    images.py                           /v1/images/generations, edits and variations
    answer.py                           what the answers of completions and chats share
"""

from lmi_server.dialects.openai.chat import CHAT_FIELDS, parse_chat
from lmi_server.dialects.openai.completions import COMPLETION_FIELDS, completion_lines, parse_completion
from lmi_server.dialects.openai.request import name_to_show
from lmi_server.dialects.openai.responses import parse_response

__all__ = [
    "CHAT_FIELDS",
    "COMPLETION_FIELDS",
    "completion_lines",
    "name_to_show",
    "parse_chat",
    "parse_completion",
    "parse_response",
]

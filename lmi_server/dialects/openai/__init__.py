"""OpenAI's dialect: completions and chat completions, with the extra sampling parameters that vLLM takes.

On /invocations the same bodies are taken as LMI takes them: `option.output_formatter` may choose the form of a chat's
answer, and a `model` that is not served is only a warning.
"""

from lmi_server.dialects.openai.chat import CHAT_FIELDS, parse_chat
from lmi_server.dialects.openai.completions import COMPLETION_FIELDS, parse_completion
from lmi_server.dialects.openai.request import name_told
from lmi_server.dialects.openai.responses import parse_response

__all__ = ["CHAT_FIELDS", "COMPLETION_FIELDS", "name_told", "parse_chat", "parse_completion", "parse_response"]

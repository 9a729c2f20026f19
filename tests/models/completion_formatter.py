"""An output formatter that reads vLLM's object, as LMI's example does. For tests only."""

import wording
from djl_python.output_formatter import output_formatter


@output_formatter
def write(response):
    if "quiet" in getattr(response, "generated_text", ""):
        return response
    if hasattr(response, "choices") and response.choices:
        first = response.choices[0]
        if hasattr(first, "message") and hasattr(first.message, "content"):
            first.message.content = wording.shout(first.message.content)
        elif hasattr(first, "text"):
            first.text = wording.shout(first.text)
    return response

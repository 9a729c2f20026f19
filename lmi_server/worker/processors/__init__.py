"""How one request is answered, by the kind of handler.

base.py         the interface
generation.py   an LLMHandler generates, after the model's own code; formats.py chooses who parses requests
responses.py    an AsyncRequestHandler answers by itself
sessions.py     requests that open and close stateful sessions
translation.py  requests of optional dialects to handlers that read LMI's
"""

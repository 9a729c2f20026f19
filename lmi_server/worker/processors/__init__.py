"""How one request is answered, by the kind of handler.

base.py             the interface
generation.py       an LLMHandler generates; formats.py chooses who parses requests and writes answers
responses.py        an AsyncRequestHandler answers by itself
custom_handler.py   code of the model that gets a request before a built-in handler
sessions.py         requests that open and close stateful sessions
translation.py      requests of optional dialects to handlers that read LMI's
"""

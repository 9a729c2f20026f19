"""Structured output: turns what an answer must match into a grammar, within bounds of time and memory.

llguidance, the library of the grammars, is imported late, when a model loads or a request needs it.

    options.py        the key of handlers that use it
    limits.py         what a schema, a pattern or a list of choices may be
    grammar_text.py   a constraint as the text of a grammar in llguidance's form
    check_process.py  compiles a grammar in a process whose memory and time are bounded
    compiler.py       constraint -> compiled grammar, and the cache of them
"""

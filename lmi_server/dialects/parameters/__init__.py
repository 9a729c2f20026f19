"""The parameters of generation that LMI's requests and OpenAI's share.

sampling.py      the fields of vLLM's SamplingParams
choices.py       several sequences for one prompt
constraints.py   the fields that constrain the output: schemas, grammars, choices
"""

"""The rolling batch for engines that bring no scheduler: iteration-level batching over a slotted KV cache.

The path of a step:

    scheduler.py      plain data in, plain data out: which sequences decode, which prompt tokens are computed
    model_runner.py   the plan as one flat forward pass of the transformers model
    attention.py      attention of that pass over the slots of kv_cache.py (kernels.py on the CPU)
    sampler.py        the next token of every sequence
    detokenizer.py    its text, without half characters and possible stop sequences
    engine.py         the step that ties them together
"""

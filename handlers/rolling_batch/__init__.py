"""The rolling batch for engines without a scheduler of their own: iteration-level batching over a slotted KV cache.

The path of a step:

    scheduler.py      plain data in, plain data out: which sequences decode, which prompt tokens are computed
    model_runner.py   runs the plan as one flat forward pass of the transformers model
    attention.py      attention of that pass over the slots of kv_cache.py (cpu_kernels/ on the CPU)
    sampler.py        chooses the next token of every sequence
    detokenizer.py    turns tokens into text, without incomplete characters and possible stop sequences
    engine.py         the step that ties them together

Imports `checkpoints/`, `step_loop.py`, and of lmi_server the contract, the machine and the declarations of options.
"""

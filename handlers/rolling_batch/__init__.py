"""The rolling batch for engines without a scheduler of their own: iteration-level batching over a slotted KV cache.

The path of a step:

    schedule/         plain data in, plain data out: the sequences that decode, the prompt tokens to compute
    runner/           runs the plan as one flat forward pass of the transformers model
    attention/        attention of that pass over the slots of the KV cache
    cpu/              layers as `cpu_kernels/` computes them
    sampling/         chooses the next token of every sequence
    engine.py         the step that ties them together; `request.py` is what it knows of one request

Beside the path: `lora/` has the adapters, `speculation/` the drafted tokens.

Imports `checkpoints/`, `cpu_kernels/`, `generation/`, `ranks/` and `step_loop.py`, and of lmi_server the contract, the
machine and the declarations of options.
"""

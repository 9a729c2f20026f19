"""Causal language models on AWS Inferentia and Trainium: transformers-neuronx and optimum-neuron under the scheduler.

Neither package was run on a Neuron device: tests run the handler over a fake of transformers-neuronx that has its
signatures, and check the calls of optimum-neuron against its real ones.

    options.py           the keys, and what the engine gets of them
    handler.py           the handler
    loading.py           chooses the package, loads, compiles, saves (partition), and makes the engine
    tnx_model.py         the calls of transformers-neuronx
    optimum_model.py     the calls of optimum-neuron

Imports `rolling_batch/`, `checkpoints/`, `neuron_failures.py`, and of lmi_server the contract, the machine and the
declarations of options.
"""

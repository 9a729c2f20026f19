"""The handler of TensorRT-LLM: NVIDIA's LLM API, with engines that TensorRT builds or on PyTorch.

No part of it has run on a GPU or with NVIDIA's package; all of it runs in the tests on a fake package with the same
signatures (tests/support/fake_tensorrt_llm).

`handler.py` and `options.py` can be imported anywhere; `library.py` is the only module that imports the package. May
import the contract, the machine, the declarations of options, and what handlers share.
"""

"""Kernels of the rolling batch for the CPU, compiled by numba when a model loads. Imports nothing else of this project.

    decoder, linear, rows   what a layer is made of; arguments, arrays: what kernels take
    attention/              one query token for each sequence, and chunks of prompts
    blocks/                 linear layers whose weights have few bits
    intrinsics, amx, inlined   what numba's language lacks
    threads/                how threads and ranks share work
    compilation/            the decorators, and where compiled code is kept

torch's own operators do not suit a step of decoding. Its attention pays per call for one query token per sequence; its
products of bfloat16 round sums to bfloat16; each element-wise operation reads and writes all activations. Here each of
these is one pass over memory, parallel over rows. The kernels are written in numba's part of Python, so that no
compiler is needed on the user's machine. numba compiles for the processor at hand and keeps the result on disk.

bfloat16 tensors come in as uint16 arrays, because numpy has no bfloat16; sums of them are float32. Kernels run without
Python's interpreter lock and check nothing: shapes and strides are the caller's duty.
"""

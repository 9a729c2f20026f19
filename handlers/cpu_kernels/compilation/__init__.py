"""How kernels are compiled: the decorators, where compiled code is kept, and what parts of kernels need no code for."""

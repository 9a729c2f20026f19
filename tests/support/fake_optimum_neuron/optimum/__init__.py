"""A fake of the namespace of optimum-neuron; see the README beside it."""

"""Compiled code on the CPU: a process in the background makes it while the model serves without, and stores it."""

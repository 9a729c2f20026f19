"""Threads that share the work of a kernel, and memory that the ranks of a machine share."""

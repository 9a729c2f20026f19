"""Runs the plan of a step: the forward passes, on one rank or on several."""

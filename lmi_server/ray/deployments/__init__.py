"""What a deployment of a model is, read from model directories and model files of Ray.

Needs no Ray. Imports `serving` and the folders below it.
"""

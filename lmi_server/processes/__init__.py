"""Processes of this machine: their trees and use, file descriptors and secrets, the imports that load a model."""

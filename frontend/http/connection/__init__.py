"""The parts of a connection (frontend/http/protocol.py), each with one duty."""

"""Models and adapters: registration, listing and removal over HTTP."""

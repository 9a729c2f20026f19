"""The description of the API at /openapi.json."""

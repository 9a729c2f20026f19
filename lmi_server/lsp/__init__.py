"""A language server for serving.properties and Ray's model files: what `check` finds, completion, and hover."""

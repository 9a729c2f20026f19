"""A new version of a model proves itself on some requests, or on copies, before it takes the old one's place."""

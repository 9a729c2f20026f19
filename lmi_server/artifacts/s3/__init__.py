"""A local copy of the objects below an S3 prefix."""

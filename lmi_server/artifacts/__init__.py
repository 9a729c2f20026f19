"""Brings a model's files to this machine before its worker starts: archives, S3, the Hugging Face Hub, requirements.

`fetch.fetch_artifacts` is the entry. `unpacking/` is the program that unpacks archives, `s3/` the copy of an S3 prefix.
"""

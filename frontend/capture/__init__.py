"""Requests and answers in the lines of SageMaker's data capture, in files or on S3."""

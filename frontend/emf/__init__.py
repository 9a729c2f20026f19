"""Metrics in CloudWatch's embedded metric format, as lines of the log."""

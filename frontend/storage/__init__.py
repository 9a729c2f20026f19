"""Where features keep what must outlive the server: objects and journals, in a directory or on S3."""

"""Chat completions in OpenAI's form, for code that reads them itself."""

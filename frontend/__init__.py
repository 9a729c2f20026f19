"""The HTTP front end: it relays bytes and knows no model, no tokenizer and no engine."""

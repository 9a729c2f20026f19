"""What the front end, the workers and the handlers share: errors, messages, the link and the handlers' interfaces."""

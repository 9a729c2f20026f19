"""What may stand in messages, logs and errors: quoted texts, no secrets, sizes in words."""

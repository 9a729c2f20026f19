"""torch's private operators, which handlers use where the installed torch has them."""

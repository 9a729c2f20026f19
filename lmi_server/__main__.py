"""`python -m lmi_server` is the command `lmi-server`."""

from lmi_server.commands.start import main

main()

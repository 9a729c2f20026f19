"""The advice of `lmi-server advise`: what a live server's metrics and log show, and the rules that read it."""

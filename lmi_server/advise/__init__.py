"""The advice of `lmi-server advise`: a live server's metrics and log, and the rules on them."""

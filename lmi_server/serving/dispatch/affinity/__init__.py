"""Which worker a request had better go to: that of its session, its prefix or its adapter."""

"""The advice of `lmi-server advise`: what a live server's metrics and log show, and the rules that read it.

Imports `contract`, `machine` and `bench`, whose readings of metrics it uses.
"""

"""The load generator of `lmi-server bench`: what is asked, when it is asked, the client, and what was measured.

It runs against any server, so nothing here depends on how this one works.
"""

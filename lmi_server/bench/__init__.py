"""The load generator of `lmi-server bench`: the requests, their times, the client, and the results.

It runs against any server, so nothing here depends on how this one works.
"""

"""`lmi-server route`: the queue and the dispatcher of this server in front of other servers, over HTTP.

headers.py     which headers go on
connection.py  one HTTP/1.1 connection to a server, and those of one address
exchange.py    one request at a server, from its head to the end of its answer
backend.py     a server that stands where the dispatcher has a worker
fleet.py       which servers there are: names, health, models
pool.py        the pool of one model, whose workers are servers
registry.py    the models of all servers
limits.py      what each key may have
"""

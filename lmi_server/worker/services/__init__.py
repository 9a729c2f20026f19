"""What serves the requests of one model in a worker, by the kind of handler.

base.py           the interface, as the event loop of the link sees it
concurrent.py     requests as tasks of an event loop: that of the link, or one in the main thread
threaded.py       a handler in the main thread, while the link lives in another thread
batches.py        batches of requests in that thread, one after the other
"""

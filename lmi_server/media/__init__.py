"""Opens the images and sounds of requests, within a limit on what they take when they are decoded.

A file of a few kilobytes can hold any number of pixels or samples, so that its size says nothing. Every handler, and
`djl_python` for the code of users, opens media by these functions and in no other way.

    budget.py            what the media of one request may take together
    images.py            images, and what may be done to read them
    sounds.py            sounds
    fetching.py          what a request names by URL, from public addresses alone (public_addresses.py)
"""

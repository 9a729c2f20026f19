"""Unpacks one untrusted archive; `artifacts/archive.py` runs it as a program of its own, with bounded memory and time.

    __main__.py   the program: sets its limits, unpacks, says what went wrong
    unpack.py     tells tar from zip; the errors of damaged archives
    tar_file.py   the entries of a tar, in any compression
    zip_file.py   the entries of a zip
    bounded.py    what the libraries read archives through: no header is read that is larger than a bound
    names.py      the names of entries, as paths
    tree.py       writes files, directories and links below a directory, and nowhere else
    limits.py     counts entries and bytes

Imports only `contract` and the standard library, so that the program starts fast and needs little memory.
"""

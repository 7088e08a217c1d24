"""Algorithms that are one file each: knobs, loss, and ``SPEC``. The file's name is the algorithm's; nothing else lists it."""

"""What areno computes on CPUs with C++ of its own, inside compiled decode steps: built on first use, kept on disk.

``library`` builds and loads a source; each kernel is a ``.cpp`` with a module of its name beside it.
"""

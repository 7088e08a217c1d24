"""What areno does on CPUs in C++ of its own, in decode steps and for memory: built on first use, kept on disk.

``library`` builds and loads a source; each kernel is a ``.cpp`` with a module of its name beside it.
"""

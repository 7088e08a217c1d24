"""C++ code for CPUs, for decode steps and memory allocation: compiled on first use, cached on disk.

``library`` compiles and loads a source file. Each kernel has a ``.cpp`` file and a Python module of the same name.
"""

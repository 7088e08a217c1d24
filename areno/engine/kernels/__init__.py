"""C++ code for decode steps and memory allocation on CPUs. The code is compiled on first use, and cached on disk.

``library`` compiles and loads a source file. Each kernel has a ``.cpp`` file and a Python module of the same name.
"""

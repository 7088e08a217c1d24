"""The command line. Each command has a small module, which ``main`` imports only when the command is used.

The flags of commands with many flags are declared outside this package:

- ``train``, ``plan``: ``areno/config/*_options.py``, and for some algorithms their file in ``areno/algorithms``.
- ``eval``, ``export``: ``areno/config/eval_options.py``; ``serve``, ``chat``: ``areno/config/serve_options.py``.
- ``run``, ``launch``: settings of YAML files, in ``areno/config/experiment/*_sections.py``.

The modules of the other commands declare their own flags:

- Commands that need no run: ``check``, ``env``, ``convert``, ``quickstart``, ``completion``.
- Commands for existing runs: ``inspect``, ``report``, ``explain``, ``plot``, ``diff``, ``replay``, ``view``, ``scale``.
"""

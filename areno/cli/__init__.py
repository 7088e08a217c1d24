"""The command line. Each command has a small module, which ``main`` imports only when the command is used.

The options of commands with many options are declared outside this package:

- ``train``, ``plan``: ``areno/config/*_options.py``, and for some algorithms ``areno/algorithms/<name>.py``.
- ``eval``, ``export``: ``areno/config/eval_options.py``.
- ``serve``, ``chat``: ``areno/config/serve_options.py``.
- ``run``, ``launch``: ``areno/config/experiment/*_sections.py``, for settings in a YAML file or as ``key=value``.

The modules of the other commands declare their own options:

- Commands that need no run: ``check``, ``env``, ``convert``, ``quickstart``, ``completion``.
- Commands for existing runs: ``inspect``, ``report``, ``explain``, ``plot``, ``diff``, ``replay``, ``view``, ``scale``.
"""

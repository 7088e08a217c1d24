"""The command line: one thin module per command, each imported only when it is chosen; ``main`` chooses it.

Flags are declared outside this package, where a command has many:

- ``train``, ``plan``: ``areno/config/*_options.py``, and for some algorithms their file in ``areno/algorithms``.
- ``eval``, ``export``: ``areno/config/eval_options.py``; ``serve``, ``chat``: ``areno/config/serve_options.py``.
- ``run``, ``launch``: settings of YAML files, in ``areno/config/experiment/*_sections.py``.

The modules of other commands (``check``, ``env``, ``inspect``, ``convert``, ``scale``, ``quickstart``) declare their own.
"""

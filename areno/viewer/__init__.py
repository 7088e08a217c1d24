"""``areno view``: a local web page over run directories.

- :mod:`server`: the options of the command, and the process
- :mod:`app`: the JSON endpoints, and the page's own files
- :mod:`access`: API key, Host header and response headers
- :mod:`catalog`: the runs below a folder, and one opened run
- :mod:`curves`: metrics for charts
- :mod:`sample_pages`: filters, search and pages of recorded samples
- :mod:`evaluations`: answers to the same prompts in two evaluations
- :mod:`timeline`: sessions and phases over time, with weight versions
- :mod:`tails`: the ends of files that a run appends to
- :mod:`changes`: server-sent events about new data
- ``static/``: the page: HTML, CSS, ES modules without a build step, and uPlot
"""

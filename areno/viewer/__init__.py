"""``areno view``: a local web page that shows run directories.

- ``server``: the options of the command, and the process
- ``app``: the JSON endpoints and the files of the page
- ``access``: API key, Host header and response headers
- ``catalog``: the runs below a folder, and an opened run
- ``confined``: opens files of runs, only inside the folder
- ``curves``: metrics for charts
- ``sample_pages``: filters, search and pages of recorded samples
- ``evaluations``: answers to the same prompts in two evaluations
- ``timeline``: sessions and phases over time, with weight versions
- ``tails``: reads the ends of files to which a run appends
- ``changes``: server-sent events about new data
- ``static/``: the files of the page: HTML, CSS, uPlot, and ES modules that need no build step
"""

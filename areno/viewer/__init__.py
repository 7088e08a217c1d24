"""``areno view``: a local web page that shows run directories.

- ``server``: runs the server process
- ``app``: the JSON endpoints and the files of the page
- ``access``: checks the API key and the Host header, and adds security headers to responses
- ``catalog``: finds the runs below a folder, and opens a run
- ``confined``: opens files of runs, but only files inside the folder
- ``curves``: prepares metrics for charts
- ``sample_pages``: filters and searches recorded samples, and returns pages of samples
- ``evaluations``: compares the answers of two evaluations, prompt by prompt
- ``timeline``: reads sessions and phases over time, with weight versions
- ``tails``: reads the ends of files to which a run appends
- ``changes``: sends events about new data to the page
- ``static/``: the files of the page: HTML, CSS, uPlot, and ES modules that need no build step
"""

"""What a run did, read from its directory while it runs or afterwards.

- :mod:`run_data`: the files of a run as data
- :mod:`explanation`: what a metric is, and what is normal
- :mod:`compare`, :mod:`divergence`, :mod:`comparison_text`: what differs between two runs, and the first step that does
- :mod:`plot`, :mod:`svg`: curves of several runs; :mod:`export`: their metrics and samples as tables
"""

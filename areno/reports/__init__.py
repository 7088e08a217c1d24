"""What a run did, read from its directory while it runs or afterwards.

- :mod:`run_data`: the files of a run as data
- :mod:`explanation`: what a metric is, and what is normal
"""

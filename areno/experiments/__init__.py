"""Experiments: YAML files, and the family of algorithms on one loss.

- ``run``: from a command line to the end; ``trainers``: what a step does; ``checks``: what a configuration names.
- ``name_resolve``: how processes on several machines find each other; ``folders``: where a run is kept.
"""

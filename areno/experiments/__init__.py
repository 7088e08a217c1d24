"""Experiments from YAML: what they run, when they save and evaluate, and how they go on after a crash."""

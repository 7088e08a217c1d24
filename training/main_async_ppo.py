"""Asynchronous PPO with the keys of the quickstart; ``--help`` lists them."""

import sys

from areno.experiments.run_experiment import legacy_program

if __name__ == "__main__":
    sys.exit(legacy_program(asynchronous=True))

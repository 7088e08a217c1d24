"""Lets ``python -m areno`` stand for the ``areno`` command."""

import sys

from areno.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""Entry point of ``python -m areno``."""

import sys

from areno.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""Command line of `long_run`."""

import sys

from .long_run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

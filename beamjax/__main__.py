"""`python -m beamjax`, the same as the command `beamjax`."""

import sys

from beamjax.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

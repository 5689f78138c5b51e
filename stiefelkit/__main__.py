"""`python -m stiefelkit` is the same as `stiefelkit`."""

import sys

from stiefelkit.cli import main

if __name__ == "__main__":
    sys.exit(main())

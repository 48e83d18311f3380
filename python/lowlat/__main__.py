"""``python -m lowlat`` is the command ``lowlat``."""

import sys

from lowlat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

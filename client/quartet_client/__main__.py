"""`python -m quartet_client` is the `quartet` command."""

import sys

from quartet_client.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m gt COMMAND`: the same commands as the script `gt`."""

import sys

from gt.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m gt.launch`: the nursery; started by gt.launch.local, not by hand."""

import sys

from gt.launch.supervisor import main

sys.exit(main())

"""`python -m gt.launch`: the supervisor. gt.launch.local starts it; it is not for the command line."""

import sys

from gt.launch.supervisor import main

sys.exit(main())

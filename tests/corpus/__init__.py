"""A corpus of planned programs as text, by which a refactor shows that it changed nothing: see __main__.py."""

import sys
from pathlib import Path

if (tests := str(Path(__file__).resolve().parent.parent)) not in sys.path:
    sys.path.insert(0, tests)  # as pytest has it: programs are those of other tests

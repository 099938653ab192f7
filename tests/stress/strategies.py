"""`python -m tests.stress.strategies [--first N] [--count N] [--offload B]`: random programs and strategies.

Each seed is a model, a mesh, an optimizer and a strategy (stage of ZeRO, buckets, offload, activation checkpointing), eager or
captured. With --offload all are captured, with the backend B, and offload their state. Its 20 losses and first gradients have
to be within 1e-5 of one process. A few seeds are in the test suite.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import gt
from gt.ir.instr import BACKENDS
from tests.helpers.serving import serving
from tests.system.parity.strategies.test_zero_random import compare

WORKERS = 8


def run(first: int, count: int, backend: str) -> dict[int, str]:
    """The seeds that fail, and why."""
    failed: dict[int, str] = {}
    with serving(WORKERS, "torch") as server:
        for seed in range(first, first + count):

            def session(text: str) -> None:
                gt.shutdown()
                gt.connect(server.address, config=text)

            with tempfile.TemporaryDirectory() as folder:
                try:
                    compare(seed, folder, session, backend)
                except Exception as error:  # an error of the program counts as much as another number
                    failed[seed] = f"{type(error).__name__}: {error}"
                print(f"seed {seed}: {failed.get(seed, 'equal')}", flush=True)
        gt.shutdown()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--offload", default="", choices=BACKENDS)
    options = parser.parse_args()
    failed = run(options.first, options.count, options.offload)
    print(f"{len(failed)} of {options.count} seeds differ: {sorted(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

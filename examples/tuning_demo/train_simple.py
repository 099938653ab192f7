"""The simplest way: just run it. GT loads the config, starts a server and eight workers, trains, and cleans up.

Takes the flags of train.py: `python examples/tuning_demo/train_simple.py --check`.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.setdefault("GT_CONFIG", str(HERE / "sharding_config.yaml"))

import gt  # noqa: E402  GT_CONFIG is read when workers start

sys.path.insert(0, str(HERE))
import train  # noqa: E402

if __name__ == "__main__":
    sys.exit(train.main(start=lambda: gt.gpu_workers(8)))  # CPU workers where there are fewer GPUs

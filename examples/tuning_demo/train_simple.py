"""Trains Mini-GPT on eight workers that it starts itself: `python examples/tuning_demo/train_simple.py [--check] ...`.

The config is sharding_config.yaml, unless GT_CONFIG names another. The flags are those of train.py.
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
    sys.exit(train.main(start=lambda: gt.gpu_workers(8), about=__doc__))  # CPU workers where there are fewer GPUs

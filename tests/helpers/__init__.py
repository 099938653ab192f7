"""Parts that several tests share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, EXAMPLES = ROOT / "configs", ROOT / "examples"

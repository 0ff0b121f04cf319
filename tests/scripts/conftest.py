"""Makes the scripts' helper package importable, as ``lm``, the way the scripts see it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

"""Makes the scripts importable: one makes a tokenizer without network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

"""Let the tests import the exporter and the example's files, which are not packages."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2]
sys.path[:0] = [str(EXAMPLES / "export"), str(EXAMPLES / "gpt2")]

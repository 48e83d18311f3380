"""What the package reads of the environment, and nothing else does."""

import os
import tempfile
from pathlib import Path


def fault_folder() -> Path:
    """Where post-mortems go: $LOWLAT_FAULT_DIR, else the folder for temporary files."""
    return Path(os.environ.get("LOWLAT_FAULT_DIR") or tempfile.gettempdir())

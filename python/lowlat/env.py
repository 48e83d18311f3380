"""What the package reads of the environment, and nothing else does."""

import os
import tempfile
from pathlib import Path


def fault_folder() -> Path:
    """Where post-mortems go: $LOWLAT_FAULT_DIR, else the folder for temporary files."""
    return Path(os.environ.get("LOWLAT_FAULT_DIR") or tempfile.gettempdir())


def takes_slow_ranks() -> bool:
    """Whether ranks that the fast kernels do not serve are accepted: $LOWLAT_SLOW_RANKS=1."""
    return os.environ.get("LOWLAT_SLOW_RANKS") == "1"


def whole_search_path() -> dict[str, str]:
    """The environment for a Python that starts in another folder: $PYTHONPATH with whole paths."""
    environment = dict(os.environ)
    if found := environment.get("PYTHONPATH"):
        # An empty entry is the current folder.
        folders = [str(Path(folder).absolute()) for folder in found.split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment

"""The built parts of the installation: the two native modules and the engine's binary."""

import importlib
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType

from lowlat.cli.outcome import FaultError, one_line


def native(name: str) -> ModuleType:
    """Imports ``lowlat.<name>``; a missing or broken one is a fault that says how to get it."""
    try:
        return importlib.import_module(f"lowlat.{name}")
    except ImportError as error:
        raise FaultError(
            f"lowlat.{name} does not load ({one_line(error)}); install lowlat again"
            " (pip install . in its repository)"
        ) from error


def version() -> str:
    """The version of the installed package."""
    try:
        return metadata.version("lowlat")
    except metadata.PackageNotFoundError:
        raise FaultError("lowlat is not installed (pip install . in its repository)") from None


def installed_file(*parts: str) -> Path:
    """A file that the build put inside the package, such as ``_bin/lowlat-engine``."""
    # Not __file__: in an editable install the built files lie elsewhere.
    path = Path(str(resources.files("lowlat").joinpath(*parts)))
    if not path.is_file():
        raise FaultError(
            f"{'/'.join(parts)} is missing from the installed lowlat; install it again"
            " (pip install . in its repository)"
        )
    return path

"""Output files, written whole or not at all; whatever is wrong with a path is one line."""

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lowlat.cli.outcome import RefusedError, one_line


def is_regular(path: Path) -> bool:
    """Whether the path leads to a file, and not to a folder, a pipe or a device."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        raise RefusedError(f"{path}: no such file") from None
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or one_line(error)}") from error


def read_json(path: Path, schema: str, version: int, writer: str) -> dict[str, Any]:
    """The object of a file of ours, of this schema and version; refused by name where not."""
    if not is_regular(path):
        raise RefusedError(f"{path}: not a regular file; needed one that {writer} wrote")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{path}: no JSON ({one_line(error)})") from error
    if not isinstance(said, dict) or said.get("schema") != schema:
        raise RefusedError(f"{path}: no {schema} file; needed one that {writer} wrote")
    if said.get("schema_version") != version:
        seen = said.get("schema_version")
        raise RefusedError(f"{path}: schema_version is {seen!r}; {version} is read here")
    return said


def check_output(path: Path, in_path: Path | None = None) -> None:
    """Refuses an output path that is no place for a file, before anything is computed."""
    try:
        # The rename at the end would put a file in the place of a pipe or a device.
        is_other = path.exists() and not path.is_file()
        if is_other or not path.parent.is_dir():
            raise RefusedError(f"{path}: needed the path of a file in a folder that exists")
        if in_path and path.exists() and in_path.exists() and path.samefile(in_path):
            raise RefusedError(f"{path}: is the input too; needed another file")
    except OSError as error:
        raise RefusedError(f"{path}: cannot be written: {error.strerror}") from error


def write(path: Path, fill: Callable[[BinaryIO], None]) -> None:
    """Writes the whole file or leaves what was there: a temporary file beside it, then a rename."""
    try:
        # Through a link, so that the link stays.
        target = path.resolve()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise RefusedError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; an ordinary output has the user's usual rights.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as error:
        raise RefusedError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write(path, lambda file: file.write(text.encode()))

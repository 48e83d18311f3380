"""Reads and writes the ``.npz`` files of ``lowlat op``.

Whatever is wrong with a file is one line that names the file and the array. Nothing in a file is
ever executed: pickled objects are refused.
"""

import math
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError

import numpy as np

from lowlat.cli.outcome import RefusedError, one_line

SUFFIX = ".npy"


def read(path: Path) -> dict[str, np.ndarray]:
    """Every array of the file by name."""
    if not is_regular(path):
        raise RefusedError(f"{path}: not a regular file; needed an .npz archive")
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(SUFFIX)
                if name == info.filename:
                    raise RefusedError(f"{path}: holds {name!r}, which is no {SUFFIX} array")
                if name in arrays:
                    raise RefusedError(f"{path}: array {name} is there twice")
                arrays[name] = read_member(path, archive, info, name)
    except zipfile.BadZipFile as error:
        raise RefusedError(
            f"{path}: not a whole .npz archive ({one_line(error)}); write it with numpy.savez"
        ) from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or one_line(error)}") from error
    return arrays


def is_regular(path: Path) -> bool:
    """Whether the path leads to a file, and not to a folder, a pipe or a device."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        raise RefusedError(f"{path}: no such file") from None
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or one_line(error)}") from error


def read_member(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str
) -> np.ndarray:
    """One array, checked to be as long as its header says before memory is taken for it."""
    try:
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(member)
            header_bytes = member.tell()
        if dtype.hasobject:
            raise RefusedError(
                f"{path}: array {name} holds pickled Python objects; needed plain numbers"
            )
        needed_bytes = header_bytes + dtype.itemsize * math.prod(shape)
        if info.file_size != needed_bytes:
            raise RefusedError(
                f"{path}: array {name} is {info.file_size} bytes long; its header"
                f" (shape {list(shape)}, {dtype}) needs {needed_bytes}"
            )
        with archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    except (RefusedError, zipfile.BadZipFile, OSError, MemoryError):
        raise
    # zlib: broken compression; Runtime: encrypted, or a header too deep; NotImplemented: unknown
    # compression; the rest: a header that is none.
    except (
        ValueError,
        EOFError,
        zlib.error,
        RuntimeError,
        SyntaxError,
        TokenError,
        TypeError,
    ) as error:
        raise RefusedError(f"{path}: array {name} cannot be read ({one_line(error)})") from error


def check_output(path: Path, in_path: Path) -> None:
    """Refuses an output path that is no place for a file, before anything is computed."""
    try:
        # The rename at the end would put a file in the place of a pipe or a device.
        is_other = path.exists() and not path.is_file()
        if is_other or not path.parent.is_dir():
            raise RefusedError(f"{path}: needed the path of a file in a folder that exists")
        if path.exists() and in_path.exists() and path.samefile(in_path):
            raise RefusedError(f"{path}: is the input too; needed another file")
    except OSError as error:
        raise RefusedError(f"{path}: cannot be written: {error.strerror}") from error


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the whole file or leaves what was there: a temporary file beside it, then a rename."""
    try:
        # Through a link, so that the link stays.
        target = path.resolve()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise RefusedError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
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

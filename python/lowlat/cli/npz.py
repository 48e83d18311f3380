"""Reads and writes the ``.npz`` files of ``lowlat op``.

Whatever is wrong with a file is one line that names the file and the array. Nothing in a file is
ever executed: pickled objects are refused.
"""

import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError

import numpy as np

from lowlat.cli import files
from lowlat.cli.outcome import RefusedError, one_line

SUFFIX = ".npy"


def read(path: Path) -> dict[str, np.ndarray]:
    """Every array of the file by name."""
    if not files.is_regular(path):
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


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the whole file or leaves what was there."""
    files.write(path, lambda file: np.savez(file, **arrays))

"""lowlat.cli.npz: every way in which a file can be wrong is one line naming file and array."""

import io
import os
import stat
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from lowlat.cli import npz
from lowlat.cli.outcome import RefusedError


def member(array: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.lib.format.write_array(held, array, allow_pickle=True)
    return held.getvalue()


def archive(path: Path, members: list[tuple[str, bytes]], compression: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", compression or zipfile.ZIP_STORED) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        npz.read(path)
    words = str(caught.value)
    assert "\n" not in words
    assert str(path) in words
    return words


def test_reads_what_savez_wrote(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(path, x=x, block=np.int64(32), none=np.zeros((2, 0), np.int32))
    read = npz.read(path)
    assert list(read) == ["x", "block", "none"]
    assert np.array_equal(read["x"], x)
    assert read["block"].shape == () and read["block"] == 32
    assert read["none"].shape == (2, 0)


def test_reads_compressed_and_fortran_order(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    x = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    np.savez_compressed(path, x=x)
    assert np.array_equal(npz.read(path)["x"], x)


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere.npz")


def test_folder(tmp_path: Path) -> None:
    assert "not a regular file" in refusal(tmp_path)


def test_name_too_long(tmp_path: Path) -> None:
    assert "name too long" in refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize("header", [b"(" * 9000, b"[" * 100, b"{'descr': "])
def test_a_header_that_is_no_dict(tmp_path: Path, header: bytes) -> None:
    # Version 2 has headers read by Python's tokenizer, whose error is a type of its own.
    data = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header
    path = archive(tmp_path / "case.npz", [("x.npy", data)])
    assert "array x cannot be read" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"hello", member(np.zeros(3))])
def test_not_a_zip(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "case.npz"
    path.write_bytes(content)
    assert "not a whole .npz archive" in refusal(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_truncated(tmp_path: Path, share: float) -> None:
    path = tmp_path / "case.npz"
    np.savez(path, x=np.arange(1000, dtype=np.float32))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    refusal(path)


def test_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    np.savez(path, x=np.arange(1000, dtype=np.float32))
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    assert "CRC" in refusal(path)


def test_broken_compression(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "case.npz", [("x.npy", member(np.arange(1000)))], zipfile.ZIP_DEFLATED
    )
    data = bytearray(path.read_bytes())
    data[60:80] = bytes(20)
    path.write_bytes(data)
    refusal(path)


def test_pickled_objects_are_refused_and_not_loaded(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"

    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (loaded,))

    path = archive(tmp_path / "case.npz", [("x.npy", member(np.array([Trap()], dtype=object)))])
    words = refusal(path)
    assert "array x" in words and "pickled" in words
    assert not loaded.exists()


def test_member_that_is_no_array(tmp_path: Path) -> None:
    path = archive(tmp_path / "case.npz", [("notes.txt", b"hello")])
    assert "notes.txt" in refusal(path)


def test_array_without_header(tmp_path: Path) -> None:
    path = archive(tmp_path / "case.npz", [("x.npy", b"hello")])
    assert "array x" in refusal(path)


def test_array_there_twice(tmp_path: Path) -> None:
    data = member(np.zeros(3))
    with pytest.warns(UserWarning, match="Duplicate"):
        path = archive(tmp_path / "case.npz", [("x.npy", data), ("x.npy", data)])
    assert "twice" in refusal(path)


@pytest.mark.parametrize("change", [-4, 4])
def test_length_other_than_the_header_says(tmp_path: Path, change: int) -> None:
    data = member(np.zeros(3, np.float32))
    data = data[:change] if change < 0 else data + bytes(change)
    words = refusal(archive(tmp_path / "case.npz", [("x.npy", data)]))
    assert "array x" in words and "[3]" in words


def test_enormous_header_takes_no_memory(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1048576), }\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    words = refusal(archive(tmp_path / "case.npz", [("x.npy", data)]))
    assert "array x" in words and "1099511627776" in words


def test_encrypted_member(tmp_path: Path) -> None:
    path = archive(tmp_path / "case.npz", [("x.npy", member(np.zeros(3)))])
    data = bytearray(path.read_bytes())
    # The flag bit of encryption, in the local header and in the directory.
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    assert "array x" in refusal(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    np.savez(path, x=np.zeros(3))
    path.chmod(0)
    assert "Permission denied" in refusal(path)


def test_writes_whole_with_usual_rights(tmp_path: Path) -> None:
    path = tmp_path / "out"
    x = np.arange(4, dtype=np.float32)
    npz.write(path, {"x": x})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert np.array_equal(npz.read(path)["x"], x)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.npz"
    path.write_bytes(b"old")

    def full(file: io.BufferedWriter, **arrays: np.ndarray) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(RefusedError, match="No space left"):
        npz.write(path, {"x": np.zeros(3)})
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]


def test_write_into_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="cannot be written"):
        npz.write(tmp_path / "nowhere" / "out.npz", {})


def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.npz").symlink_to("real.npz")
    (tmp_path / "real.npz").write_bytes(b"old")
    npz.write(tmp_path / "link.npz", {"x": np.zeros(3)})
    assert (tmp_path / "link.npz").is_symlink()
    assert list(npz.read(tmp_path / "real.npz")) == ["x"]

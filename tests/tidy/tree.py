"""The repository as text: which files it holds, and how to say what is wrong with one."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What a build leaves behind; the same names as in .gitignore.
BUILT = {"build", "target", ".venv", "out", "dist", "__pycache__", ".git", ".pytest_cache"}
SOURCE_SUFFIXES = {".py", ".rs", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".hip", ".cmake", ".sh"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".txt", ".yml", ".yaml"}
TEXT_NAMES = {"Makefile", "run", ".gitignore", ".clang-format"}


@cache
def files() -> tuple[str, ...]:
    """Every file of the repository that is not ignored, with '/' and relative to the root."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout.decode()
        names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    except (OSError, subprocess.SubprocessError):
        # An unpacked archive has no .git.
        names = [
            path.relative_to(ROOT).as_posix()
            for path in ROOT.rglob("*")
            if path.is_file() and not BUILT.intersection(path.relative_to(ROOT).parts)
        ]
    return tuple(sorted(names))


def under(*folders: str, suffixes: tuple[str, ...] = ()) -> list[str]:
    """Files below any of the folders, with any of the endings (none given: every one)."""
    return [
        name
        for name in files()
        if any(name.startswith(f"{folder}/") for folder in folders)
        and (not suffixes or name.endswith(suffixes))
    ]


def text_files() -> list[str]:
    return [
        name
        for name in files()
        if Path(name).suffix in TEXT_SUFFIXES or Path(name).name in TEXT_NAMES
    ]


@cache
def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lines(name: str) -> list[tuple[int, str]]:
    """Numbered lines, from 1."""
    return list(enumerate(read(name).splitlines(), 1))


def rust_without_tests(name: str) -> str:
    """A Rust file up to its `#[cfg(test)] mod tests`, without comments; lines keep their number."""
    code = re.split(r"^#\[cfg\(test\)\]\nmod ", read(name), maxsplit=1, flags=re.MULTILINE)[0]
    return re.sub(r"//[^\n]*", "", code)


def c_without_comments(name: str) -> str:
    """A C or C++ file without comments; lines keep their number."""
    keep_lines = re.sub(
        r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), read(name), flags=re.DOTALL
    )
    return re.sub(r"//[^\n]*", "", keep_lines)


def matches(name: str, code: str, pattern: str, why: str) -> list[str]:
    """One line a line of `code` that has `pattern`."""
    return [
        f"{name}:{number}: {why}: {line.strip()[:80]}"
        for number, line in enumerate(code.splitlines(), 1)
        if re.search(pattern, line)
    ]


def none(complaints: list[str]) -> None:
    """Fails with every complaint, not with the first."""
    assert not complaints, "\n" + "\n".join(complaints)

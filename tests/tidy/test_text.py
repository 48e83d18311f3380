"""What no line of the repository may hold."""

import re

import tree

MAX_COLUMNS = 100
BANNED = [
    (r"\b(TODO|FIXME|XXX|HACK)\b(?!\s*\(?#\d+)", "work left undone needs an issue number"),
    (r"[-/]ffast-math|-Ofast", "results are declared; no fast-math"),
    (r"for some reason", "say the reason"),
]
CPP_BANNED = [
    (r"(?<!asm )\bvolatile\b", "volatile is no lock; use the platform's loads and stores"),
    (r"\b(warp|lane)\w*\s*[%/&]\s*(31|32|63|64)\b", "a warp is 32 or 64 lanes: plat::kWarpLanes"),
    (r"\busing namespace std\s*;", "name what is used"),
]
CPP_SUFFIXES = (".hpp", ".cpp", ".h", ".c", ".cuh", ".cu", ".hip")
MACHINE_PATHS = r"(?<![\w.$}>])/(work|home|root|Users|mnt|data|tmp)/\w"


def is_generated(name: str) -> bool:
    made = ("include/lowlat/dispatch.h", "capi/abi.txt")
    return name in ("Cargo.lock", "LICENSE") or name.endswith(made)


def test_no_line_is_longer_than_the_limit() -> None:
    complaints = []
    for name in tree.text_files():
        if is_generated(name):
            continue
        for number, line in tree.lines(name):
            # A table row of a page, or a link, cannot be broken.
            if name.endswith(".md") and ("|" in line or "](" in line):
                continue
            if len(line) > MAX_COLUMNS:
                complaints.append(f"{name}:{number}: {len(line)} columns; {MAX_COLUMNS} fit")
    tree.none(complaints)


def test_no_banned_word() -> None:
    complaints = []
    for name in tree.text_files():
        if name.startswith("tests/tidy/"):
            continue
        for pattern, why in BANNED:
            complaints += tree.matches(name, tree.read(name), pattern, why)
    for name in tree.under("cpp_kernels", "tests/cpp", "tests/gpu", suffixes=CPP_SUFFIXES):
        for pattern, why in CPP_BANNED:
            complaints += tree.matches(name, tree.c_without_comments(name), pattern, why)
    tree.none(complaints)


def test_no_path_of_one_machine() -> None:
    complaints = []
    for name in tree.text_files():
        if not name.startswith("tests/tidy/"):
            complaints += tree.matches(
                name, tree.read(name), MACHINE_PATHS, "a path of one machine"
            )
    tree.none(complaints)


def test_the_folder_beside_the_repository_is_named_in_tests_only() -> None:
    """Tests may read recorded traces from a folder beside the repository, and skip without it."""
    complaints = []
    for name in tree.text_files():
        if not name.startswith("tests/"):
            complaints += tree.matches(
                name, tree.read(name), r"\bshared/(data|reference|tools)\b", "not of this project"
            )
    tree.none(complaints)


def test_files_end_with_one_newline_and_hold_no_tab_or_trailing_space() -> None:
    complaints = []
    for name in tree.text_files():
        text = tree.read(name)
        if is_generated(name) or not text:
            continue
        if not text.endswith("\n") or text.endswith("\n\n"):
            complaints.append(f"{name}: must end with one newline")
        tabs = "" if name == "Makefile" else r"\t|"
        complaints += tree.matches(name, text, tabs + r"[ \t]+$", "tab or trailing space")
    tree.none(complaints)


def test_every_wait_in_python_has_an_end() -> None:
    """subprocess calls without a timeout wait for ever."""
    complaints = []
    for name in tree.under("python", "tests", suffixes=(".py",)):
        if name.startswith("tests/tidy/test_text"):
            continue
        for found in re.finditer(
            r"subprocess\.(run|check_output|check_call|call)\((?:[^()]|\([^()]*\))*\)",
            tree.read(name),
        ):
            if "timeout" not in found[0]:
                number = tree.read(name)[: found.start()].count("\n") + 1
                complaints.append(f"{name}:{number}: subprocess.{found[1]} without timeout=")
    tree.none(complaints)

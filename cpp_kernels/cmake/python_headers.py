"""Finds Python.h for the interpreter that runs this file, or fetches it without being root.

    python3 python_headers.py --fetched DIR           prints the include folders, ';' between them
    python3 python_headers.py --fetched DIR --fetch   the same, filling DIR first where needed

A Debian or Ubuntu machine may have python3-venv and no python3-dev. `--fetch` then downloads the
package libpythonX.Y-dev with an apt state of its own under DIR and unpacks it there; nothing is
installed and nothing outside DIR is written. Exit status 1 with one line when there is no way.
"""

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# apt updates over the network: enough for a slow mirror, and an end for a dead one.
APT_BUDGET_S = 300


def version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def own_folders() -> list[Path]:
    """The interpreter's own include folder, when Python.h is really there."""
    include = Path(sysconfig.get_path("include"))
    return [include] if (include / "Python.h").is_file() else []


def fetched_folders(root: Path) -> list[Path]:
    """Include folders of an unpacked libpythonX.Y-dev: Debian's pyconfig.h includes
    <TRIPLET/pythonX.Y/pyconfig.h>, so usr/include is one of them."""
    include = root / "usr" / "include" / f"python{version()}"
    return [include, include.parent] if (include / "Python.h").is_file() else []


def fetch(root: Path) -> None:
    """Fills `root`. Raises RuntimeError with one line when apt cannot."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"there is no {tool} to fetch it with")
    package = f"libpython{version()}-dev"
    apt = root / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "download"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    options = [
        f"Dir::State::lists={apt / 'lists'}",
        f"Dir::Cache={apt / 'cache'}",
        "Debug::NoLocking=1",
        "Acquire::Retries=2",
        # As root, apt drops to a user that may not read a private folder.
        "APT::Sandbox::User=root",
    ]
    command = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    run([*command, "update"], apt)
    run([*command, "download", package], apt / "download")
    packages = sorted((apt / "download").glob(f"{package}_*.deb"))
    if not packages:
        raise RuntimeError(f"apt-get downloaded no {package}")
    run(["dpkg-deb", "-x", str(packages[-1]), str(root)], root)
    shutil.rmtree(apt)


def run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=APT_BUDGET_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {APT_BUDGET_S} s") from None
    if done.returncode != 0:
        words = re.sub(r"\s+", " ", done.stderr or done.stdout).strip()[:300]
        raise RuntimeError(f"{command[0]} {command[-1]} failed: {words}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fetched", default="", help="folder of fetched headers")
    parser.add_argument("--fetch", action="store_true", help="fetch them where there are none")
    arguments = parser.parse_args()
    root = Path(arguments.fetched) if arguments.fetched else None
    folders = own_folders() or (fetched_folders(root) if root else [])
    why = ""
    if not folders and arguments.fetch and root:
        try:
            fetch(root.resolve())
        except RuntimeError as error:
            why = f" ({error})"
        folders = fetched_folders(root)
    if not folders:
        print(
            f"Python.h of Python {version()} is missing{why}: install python{version()}-dev,"
            " or run `make setup`, which fetches it where apt can",
            file=sys.stderr,
        )
        return 1
    print(";".join(str(folder.resolve()) for folder in folders))
    return 0


if __name__ == "__main__":
    sys.exit(main())

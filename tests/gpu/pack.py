"""Gathers what `make gpu-test` and `make gpu-four` need on a machine that builds nothing.

    python tests/gpu/pack.py --build-dir build/py --to out/gpu-pack

The programs of tests/gpu, stripped, in DIR/commit what they are of, and in DIR/site this Python's
lowlat and pytest. DIR.tar.xz is the same to carry, far smaller because the programs hold the same
kernels. The package holds a module for this Python's version; a machine with another leaves the
operations out and says so. numpy is taken from there.
"""

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from ranks import BENCHES, commit_of
from run import PROGRAMS, built

PACKAGES = ("lowlat", "ml_dtypes", "pytest", "pluggy", "iniconfig", "packaging", "pygments")


def copy_package(name: str, site: Path) -> None:
    installed = metadata.distribution(name)
    for file in installed.files or ():
        # Scripts lie beside the packages and are not needed.
        if ".." in file.parts or file.suffix == ".pyc":
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(installed.locate_file(file), target)


def strip(path: Path) -> None:
    subprocess.run(["strip", str(path)], check=True, timeout=60)


def archive(folder: Path) -> Path:
    """Programs of megabytes repeat each other, so the dictionary holds several."""
    path = folder.with_name(f"{folder.name}.tar.xz")
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
    with lzma.open(path, "wb", filters=filters) as out, tarfile.open(fileobj=out, mode="w|") as tar:
        tar.add(folder, folder.name)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    programs = [*PROGRAMS, *BENCHES]
    if not built(arguments.build_dir, programs, dict(os.environ), "nothing can be packed"):
        return 1
    shutil.rmtree(arguments.to, ignore_errors=True)
    site = arguments.to / "site"
    site.mkdir(parents=True)
    for name in programs:
        shutil.copy2(arguments.build_dir / name, arguments.to / name)
        strip(arguments.to / name)
    for name in PACKAGES:
        copy_package(name, site)
    for library in site.rglob("*.so"):
        strip(library)
    for program in (site / "lowlat" / "_bench").glob("[!.]*"):
        if program.suffix != ".py":
            strip(program)
    (arguments.to / "commit").write_text(commit_of(arguments.build_dir) + "\n")
    whole = sum(file.stat().st_size for file in arguments.to.rglob("*")) / 1e6
    print(f"{arguments.to}: {len(programs)} programs, {len(PACKAGES)} packages, {whole:.0f} MB")
    packed = archive(arguments.to)
    print(f"{packed}: {packed.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

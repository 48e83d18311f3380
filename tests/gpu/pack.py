"""Gathers what `make gpu-test` and `make gpu-four` need on a machine that builds nothing.

    python tests/gpu/pack.py --build-dir build/py --to out/gpu-pack

The programs of tests/gpu, stripped, and in DIR/site this Python's lowlat and pytest. The package
holds a module for this Python's version; a machine with another leaves the operations out and says
so. numpy is taken from there.
"""

import argparse
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from ranks import BENCHES
from run import BUILD_BUDGET_S, PROGRAMS

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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    programs = [*PROGRAMS, *BENCHES]
    build = ["cmake", "--build", str(arguments.build_dir), "--target", *programs]
    subprocess.run(build, check=True, timeout=BUILD_BUDGET_S)
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
    megabytes = sum(file.stat().st_size for file in arguments.to.rglob("*")) >> 20
    print(f"{arguments.to}: {len(programs)} programs and {len(PACKAGES)} packages, {megabytes} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

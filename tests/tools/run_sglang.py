"""Runs tests/sglang against the real SGLang, in a virtual environment of its own.

    python run_sglang.py [--existing] [--filter WORD] [--junit-xml FILE]

The environment lies outside the checkout, in $LOWLAT_CACHE or ~/.cache/lowlat, in a folder named
after its lock file (tests/sglang/requirements.txt) and Python, and is made once: about 6 GB and
five minutes. One that no run used for two weeks goes when another is made. Where it cannot be made
(no network, no room, too slow), the tests are skipped with the reason and the exit status is 0;
--existing makes none. Run it with the Python that lowlat is installed in.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "sglang"
LOCK = TESTS / "requirements.txt"
SITE = ROOT / "build" / "sglang" / "site"
INSTALL_BUDGET_S = 900
TESTS_BUDGET_S = 1200
NEEDED_BYTES = 9 << 30
MARKER = "complete"  # its time says when the environment was used last
UNUSED_S = 14 * 24 * 3600


class CannotError(Exception):
    """Why the environment cannot be had here."""


def environment_folder() -> Path:
    cache = os.environ.get("LOWLAT_CACHE") or "~/.cache/lowlat"
    version = f"{sys.implementation.cache_tag}".encode()
    digest = hashlib.sha256(LOCK.read_bytes() + version).hexdigest()[:12]
    return Path(cache).expanduser() / f"sglang-{digest}"


def environment(existing: bool) -> Path:
    """The environment's Python; made when it is not there, unless `existing`."""
    folder = environment_folder()
    python = folder / "bin" / "python"
    if existing and not (folder / MARKER).exists():
        raise CannotError("SGLang's environment is not here (make test-sglang makes it: 6 GB)")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.lock").open("w") as lock:
            take(lock)
            if not (folder / MARKER).exists():
                remove_unused(folder.parent, folder.name, time.time())
                make(folder, python)
            (folder / MARKER).touch()
    except OSError as error:
        raise CannotError(f"{folder}: {error.strerror or error}") from error
    return python


def remove_unused(cache: Path, keep: str, now: float) -> None:
    """Removes the environments in `cache`, but `keep`, that were last used long before `now`, and
    what is left of one that was never whole; those that somebody makes stay."""
    for folder in sorted(cache.glob("sglang-*")):
        if folder.name == keep or not folder.is_dir():
            continue
        marker = folder / MARKER
        used = (marker if marker.exists() else folder).stat().st_mtime
        if now - used < UNUSED_S:
            continue
        path = cache / f"{folder.name}.lock"
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            path.unlink()


def take(lock) -> None:
    """One checkout at a time makes it; the others wait as long as it may take."""
    end = time.monotonic() + INSTALL_BUDGET_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise CannotError(f"{lock.name} is held by another run") from None
            time.sleep(1)


def make(folder: Path, python: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise CannotError(f"{folder.parent} has {free >> 30} GiB free; needed {NEEDED_BYTES >> 30}")
    print(f"making {folder} (once, some minutes)", flush=True)
    end = time.monotonic() + INSTALL_BUDGET_S
    # The wheels are unpacked once and take 3 GB: pip need not keep them as well.
    install = ["-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps", "--retries", "2"]
    try:
        ran([sys.executable, "-m", "venv", str(folder)], end)
        ran([str(python), *install, "-r", str(LOCK)], end)
    except CannotError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def ran(command: list[str], end: float) -> None:
    """Runs a command that must end by `end`; its last words are the reason when it fails."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CannotError(f"no environment within {INSTALL_BUDGET_S} s") from None
        finally:  # of an interrupted run too, whose pip would go on in a session of its own
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        words = (output.strip().splitlines() or ["no word"])[-1]
        raise CannotError(f"{' '.join(command[1:4])} failed: {words}")


def site() -> Path:
    """A folder that holds the installed lowlat and its entry points, and nothing else."""
    try:
        installed = metadata.distribution("lowlat")
    except metadata.PackageNotFoundError:
        raise CannotError("lowlat is not installed (make build)") from None
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    for name in ("lowlat", f"lowlat-{installed.version}.dist-info"):
        (SITE / name).symlink_to(Path(str(installed.locate_file(name))).resolve())
    return SITE


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--existing", action="store_true", help="make no environment")
    parser.add_argument("--filter", default="", help="only tests whose name contains this")
    parser.add_argument("--junit-xml", type=Path, help="where pytest writes its report")
    arguments = parser.parse_args()
    try:
        python, path = environment(arguments.existing), site()
    except CannotError as error:
        print(f"tests/sglang skipped: {error}")
        return 0
    command = [str(python), "-m", "pytest", str(TESTS), "-rs", "-W", "ignore"]
    if arguments.filter:
        command += ["-k", arguments.filter]
    if arguments.junit_xml:
        command.append(f"--junit-xml={arguments.junit_xml}")
    env = os.environ | {"PYTHONPATH": str(path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True) as process:
        try:
            status = process.wait(TESTS_BUDGET_S)
        except subprocess.TimeoutExpired:
            print(f"tests/sglang did not end within {TESTS_BUDGET_S} s")
            status = 1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    no_test_has_the_word = status == 5 and bool(arguments.filter)
    return 0 if no_test_has_the_word else status


if __name__ == "__main__":
    sys.exit(main())

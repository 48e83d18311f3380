"""Everything that N ranks do on N GPUs of one host, in ten minutes, two ranks in three:
`make gpu-four RANKS=N`.

    python tests/gpu/ranks.py --ranks 4 [--build-dir build/py | --programs DIR] [--out out/gpu-four]
                              [--python PATH] [--budget SECONDS]

First correctness: the layer's and the draft's cases of so many ranks, every width in one process
with N GPUs and in N processes, the tiny models of both kinds. Then `lowlat bench` of layer,
exchange and draft beside the baselines (a Python with torch: --python), then `lowlat profile layer`
of a rank's share, then the times of whole steps. On fewer GPUs than ranks, N streams of one GPU
stand for N GPUs where they are resident together (tiny models by the resident schedule, the
draft), and elsewhere one rank whose peers are itself: correctness, and figures of a rank's
share whose exchange goes nowhere; then comes what needs one GPU anyway, and all else is listed as
not run.

Into the folder of --out go table.md (for docs/bench: date, command, spread), figures.json and the
words of every step. Exit status 1 when something failed. What was not built for so many ranks,
found no time or no lowlat in this Python is not run, which the table says.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from run import PROGRAMS, built
from runner import CASES, ROOT, NoGpuError, run, visible_gpus

BUDGETS_S = {2: 175.0, 4: 590.0}  # of all steps, by the number of ranks
WIDTHS = ("1", "6", "8", "12", "24", "48")
BENCHES = ("bench_exchange_hopper", "bench_layer", "bench_step")
NUMBERS = {2: "two", 4: "four"}


@dataclass(frozen=True)
class Step:
    """A command, the GPUs that it needs, and where its figures are."""

    name: str
    words: list[str]
    limit_s: float
    gpus: int
    figures: Path | None = None
    times: str = ""  # which of its lines are times to keep, of a program that prints no JSON

    def shown(self) -> str:
        """The command as a reader would type it, without this machine's paths."""
        words = self.words[3:] if self.words[1:3] == ["-m", "lowlat"] else self.words[1:]
        name = "lowlat" if words != self.words[1:] else Path(self.words[0]).name
        kept = [
            word
            for before, word in zip([name, *words], words, strict=False)
            if not {"--python", "--json", "--out"} & {before, word}
        ]
        return " ".join([name, *kept])


@dataclass
class Outcome:
    name: str
    command: str
    verdict: str  # passed, FAILED, not run
    words: str
    seconds: float
    times: list[str]


def steps(ranks: int, gpus: int, programs: Path, out: Path, python: str) -> list[Step]:
    """In the order of their worth: what comes late is left out first."""

    def program(name: str, *words: str) -> list[str]:
        return [str(programs / name), *words]

    def lowlat(*words: str) -> list[str]:
        return [sys.executable, "-m", "lowlat", *words]

    count, n = str(ranks), NUMBERS[ranks]
    kinds = (("v41", ()), ("v4", ("v4",)))
    own_peers = "a rank that is its own peers"

    def bench(what: str, gpus: int, *words: str) -> Step:
        name = f"bench {what}{' of v4' if 'v4' in words else ''}"
        name += " by one kernel a step" if "persistent" in words else ""
        path = out / f"{name.replace(' ', '-')}-{gpus}.json"
        case = ["--tp", count, "--gpus", str(gpus), "--python", python, "--json", str(path)]
        case += ["--repeats", "30"]
        if gpus < ranks:
            name += f", {own_peers}"
        # The baseline's kernels are compiled first, for every tile that it chooses from.
        return Step(name, lowlat("bench", what, *case, *words), 120, gpus, path)

    one_kernel = ("--rows", "1,6", "--schedule", "persistent", "--no-baseline")
    on_one = [
        Step("tiny models, as streams", program("gpu_model", f"{n}_ranks_on_one"), 120, 1),
        Step("hosted steps, as streams", program("gpu_hosted", f"{n}_ranks_on_one"), 60, 1),
        Step("draft, as streams", program("gpu_draft", "ranks_agree"), 60, 1),
        # Of four ranks a missing one was not named by its number on one GPU.
        *(
            [Step("exchange, as streams", program("bench_exchange_hopper", "check", "2"), 60, 1)]
            if ranks == 2
            else []
        ),
        Step(
            f"layers, {own_peers}",
            program("gpu_layer", "tp2_looped" if ranks == 2 else "one_by_one"),
            90,
            1,
        ),
        *[
            Step(
                f"steps of {model}, {own_peers}",
                program("bench_step", "check", *words, "loop", count, "6", "12", "48"),
                60,
                1,
            )
            for model, words in kinds
        ],
        bench("layer", 1, "--rows", "6"),
        bench("layer", 1, "--rows", "6", "--model", "v4"),
        bench("layer", 1, *one_kernel),
        bench("draft", 1, "--rows", "6"),
        Step(
            f"every width, {own_peers}",
            program("bench_layer", f"tp{ranks}", "whole", *WIDTHS),
            60,
            1,
            times="^layer  ",
        ),
    ]
    return [
        *(on_one if gpus < ranks else []),
        Step("devices", program("gpu_devices"), 30, ranks),
        Step("layers of all ranks", program("gpu_layer", f"{n}_ranks"), 120, ranks),
        Step("exchange", program("bench_exchange_hopper", "check", count), 60, ranks),
        Step("whole steps", program("gpu_step", f"{n}_ranks"), 120, ranks),
        *[
            Step(
                f"steps of {model}, a process a rank",
                program("bench_step", "processes", *words, count, "6", "24"),
                60,
                ranks,
                times=" rank 0 of ",
            )
            for model, words in kinds
        ],
        Step("draft", program("gpu_draft", f"{n}_gpus"), 30, ranks),
        Step("tiny models of both kinds", program("gpu_model", f"{n}_ranks_on_{n}"), 60, ranks),
        Step("hosted steps of these", program("gpu_hosted", f"{n}_ranks_on_{n}"), 60, ranks),
        bench("layer", ranks, "--rows", "6,24"),
        bench("layer", ranks, *one_kernel),
        Step(
            "profile of a rank's share",
            lowlat("profile", "layer", "--tp", count, "--rows", "6", "--out", str(out)),
            60,
            1,
        ),
        bench("exchange", ranks, "--rows", "12,48"),
        bench("draft", ranks, "--rows", "6,48"),
        Step(
            "every width",
            program("bench_layer", "ranks", count, "whole", *WIDTHS),
            60,
            ranks,
            times="^layer  ",
        ),
        *[
            Step(
                f"steps of {model}, timed",
                program("bench_step", "time", *words, "ranks", count, "6", "24"),
                60,
                ranks,
                times=r"ms \(10th",
            )
            for model, words in kinds
        ],
        Step(
            "a process a rank",
            program("bench_layer", "processes", count, *WIDTHS),
            60,
            ranks,
            times=" rank 0 of ",
        ),
    ]


def outcome_of(step: Step, gpus: int, left_s: float, env: dict[str, str], logs: Path) -> Outcome:
    command = step.shown()
    limit_s = min(step.limit_s, left_s)
    why = (
        f"{step.gpus} GPUs needed, {gpus} here"
        if step.gpus > gpus
        else f"{Path(step.words[0]).name} is not there"
        if not Path(step.words[0]).is_file()
        else "no time was left"
        if limit_s < 10.0
        else ""
    )
    if why:
        return Outcome(step.name, command, "not run", why, 0.0, [])
    begin = time.monotonic()
    status, output = run(step.words, env, limit_s, show=False)
    seconds = time.monotonic() - begin
    (logs / f"{step.name.replace(' ', '-')}.log").write_text(output)
    late = seconds >= limit_s
    if late and limit_s < step.limit_s:
        verdict, words = "not run", f"cut after {limit_s:.0f} s, when the budget was used up"
    else:
        verdict, words = verdict_of(status, output, late)
    lines = output.splitlines() if step.times else []
    times = [line.strip() for line in lines if re.search(step.times, line)]
    return Outcome(step.name, command, verdict, words, seconds, times)


def verdict_of(status: int, output: str, late: bool) -> tuple[str, str]:
    """What became of a step, and the line that tells. What is not built for so many ranks says so:
    a program of cases that it has no such case, a bench how it is used, lowlat what it refuses."""
    lines = [line for line in output.splitlines() if line.strip()] or ["no words"]
    wrong = [line for line in lines if line.startswith(("FAIL", "WRONG"))]
    if late:
        return "FAILED", f"no end within its time; last: {lines[-1]}"
    if status == 0:
        return "passed", lines[-1]
    if lines[-1].endswith("No module named lowlat"):
        return "not run", "this Python has no lowlat"
    if status == 77:
        return "not run", "; ".join(line for line in lines if line.startswith("skipped "))
    cases = CASES.findall(output)
    if cases[-1:] == [("0", "0", "0")]:
        return "not run", "this build has no such case"
    if wrong or status not in (1, 2) or cases:
        return "FAILED", f"status {status}: {(wrong or lines)[-1]}"
    refused = [line for line in lines if line.startswith(("lowlat: ", "usage: ", "error: "))]
    if not refused:
        return "FAILED", f"status {status}: {lines[-1]}"
    return "not run", refused[-1]


def figures_of(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["figures"] if path is not None and path.is_file() else []


def table(report: dict[str, Any]) -> str:
    """The page: what was checked, what was timed, what was not run."""
    lines = [
        f"# {report['ranks']} ranks on {report['gpus']} GPU(s)",
        "",
        f"{report['date']}, {report['machine']}, lowlat {report['version']}: `{report['command']}`,"
        f" {report['seconds']:.0f} s.",
        "",
        "| check | | seconds | |",
        "| --- | --- | --- | --- |",
    ]
    done = [one for one in report["steps"] if one["verdict"] != "not run"]
    lines += [
        f"| {one['name']} | {one['verdict']} | {one['seconds']:.1f} | {one['words']} |"
        for one in done
    ]
    if report["figures"]:
        lines += [
            "",
            "| figure | rows | median, us | 10th, 90th of 100 | floor | share | baseline | ratio |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
    for figure in report["figures"]:
        floor = f"{figure['floor']:.1f} | {figure['share']:.2f}" if "floor" in figure else " | "
        baseline = figure.get("baseline")
        other = f"{baseline['median']:.1f} | {figure['ratio']:.2f}" if baseline else " | "
        looped = ", looped back" if figure["gpus"] < figure["tp"] else ""
        lines.append(
            f"| {figure['name']} {figure['model']} TP{figure['tp']}{looped} | {figure['rows']} |"
            f" {figure['median']:.2f} | {figure['low']:.2f}, {figure['high']:.2f} | {floor} |"
            f" {other} |"
        )
    times = [f"{one['name']}: {line}" for one in done for line in one["times"]]
    if times:
        lines += ["", "```", *times, "```"]
    rest = [one for one in report["steps"] if one["verdict"] == "not run"]
    if rest:
        lines += ["", "Not run:", ""]
        lines += [f"* {one['name']} (`{one['command']}`): {one['words']}" for one in rest]
    return "\n".join(lines) + "\n"


def commit_of(programs: Path) -> str:
    """Of the sources that the programs were built of; empty where nothing tells."""
    told = programs / "commit"
    if told.is_file():
        return told.read_text().strip()
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip()
    except OSError:
        return ""


def version(env: dict[str, str], programs: Path) -> str:
    """lowlat's, and the commit where there is one."""
    words = [sys.executable, "-c", "from lowlat.cli.parts import version; print(version())"]
    told = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    return " ".join(filter(None, (told.stdout.strip() or "not installed", commit_of(programs))))


def machine() -> str:
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.split("\n")
    except OSError:
        names = []
    found = [name for name in names if name.strip()]
    return found[0] if found else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=sorted(NUMBERS), default=4)
    parser.add_argument("--build-dir", type=Path, default=Path("build/py"))
    parser.add_argument("--programs", type=Path, help="programs that are built; nothing is built")
    parser.add_argument("--out", type=Path, default=ROOT / "out/gpu-four")
    parser.add_argument("--python", default=sys.executable, help="with torch, for the baselines")
    parser.add_argument("--budget", type=float, help="seconds of all steps; default by ranks")
    arguments = parser.parse_args()
    try:
        gpus = visible_gpus()
    except NoGpuError as error:
        print(f"ranks cannot run here: {error}")
        return 1
    env = dict(os.environ)
    programs = (arguments.programs or arguments.build_dir).resolve()
    out = arguments.out.resolve()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if arguments.programs is None:
        if not built(programs, [*PROGRAMS, *BENCHES], env, "ranks cannot run"):
            return 1
    elif (programs / "site").is_dir():
        env["PYTHONPATH"] = str(programs / "site")
    budget_s = arguments.budget or BUDGETS_S[arguments.ranks]
    begin = time.monotonic()
    outcomes, figures = [], []
    for step in steps(arguments.ranks, gpus, programs, out, arguments.python):
        if step.figures is not None:
            step.figures.unlink(missing_ok=True)
        left_s = budget_s - (time.monotonic() - begin)
        outcome = outcome_of(step, gpus, left_s, env, logs)
        outcomes.append(outcome)
        # A figure counts where its run's checks were right; bench writes the file only then.
        figures += figures_of(step.figures)
        print(f"== {outcome.verdict} {outcome.name} ({outcome.seconds:.1f} s): {outcome.words}")
    report = {
        "schema": "lowlat.ranks",
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": f"make gpu-four RANKS={arguments.ranks}",
        "machine": machine(),
        "version": version(env, programs),
        "ranks": arguments.ranks,
        "gpus": gpus,
        "seconds": time.monotonic() - begin,
        "steps": [asdict(outcome) for outcome in outcomes],
        "figures": figures,
    }
    (out / "figures.json").write_text(json.dumps(report, indent=1) + "\n")
    page = table(report)
    (out / "table.md").write_text(page)
    print(page)
    failed = sum(outcome.verdict == "FAILED" for outcome in outcomes)
    passed = sum(outcome.verdict == "passed" for outcome in outcomes)
    print(f"{passed} passed, {failed} failed, {len(outcomes) - passed - failed} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

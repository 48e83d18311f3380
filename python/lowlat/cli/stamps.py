"""Clock stamps of kernels: when each stage of each block waited and when it computed.

A stamps file is JSON, as `lowlat profile` writes and reads it:

    schema, schema_version   "lowlat.stamps", 1
    what, model, schedule, tp, gpus, rows, machine   what ran, and where
    units                    layers that one measured step has
    plain_us, stamped_us     median of a layer without stamps and with: what they cost
    launches                 names of the kernels in the order of their launch
    stages                   [{"name": "x", "waits": true}, ...]
    stamps                   [[launch, stage, block, begin_ns, end_ns], ...] of one step, by one
                             clock for all blocks; indexes into the two lists
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from lowlat.cli import files
from lowlat.cli.outcome import RefusedError, one_line

SCHEMA = "lowlat.stamps"
SCHEMA_VERSION = 1

# The picture, in pixels.
WIDTH, LEFT, RIGHT, TOP = 1200, 150, 12, 58
LANE, GAP, AXIS = 84, 14, 26
# By stage that computes, in order of appearance; distinct in both themes and to most eyes.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99")
WAIT_COLOUR = "#b8b8b8"


@dataclass(frozen=True)
class Stamp:
    """When a block of a launch was in a stage; the numbers are places in the profile's lists."""

    launch: int
    stage: int
    block: int
    begin_ns: int
    end_ns: int

    @property
    def us(self) -> float:
        return (self.end_ns - self.begin_ns) / 1000


@dataclass(frozen=True)
class Stage:
    """A part of a kernel, which waits for others or computes."""

    name: str
    waits: bool


@dataclass(frozen=True)
class Profile:
    """One step's stamps; times from its first begin on."""

    about: dict[str, Any]
    launches: list[str]
    stages: list[Stage]
    stamps: list[Stamp]
    plain_us: float
    stamped_us: float

    @property
    def end_us(self) -> float:
        return max(stamp.end_ns for stamp in self.stamps) / 1000

    @property
    def overhead(self) -> float:
        """What stamps cost, as a share of the time without."""
        return self.stamped_us / self.plain_us - 1


def read(path: Path) -> Profile:
    """The file's profile; refused by name where it is none."""
    said = files.read_json(path, SCHEMA, SCHEMA_VERSION, "lowlat profile")
    try:
        return profile_of(said)
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"{path}: a broken stamps file ({one_line(error)})") from error


def profile_of(said: dict[str, Any]) -> Profile:
    launches = [str(name) for name in said["launches"]]
    stages = [Stage(str(stage["name"]), bool(stage["waits"])) for stage in said["stages"]]
    stamps = [Stamp(*map(int, numbers)) for numbers in said["stamps"]]
    if not stamps:
        raise ValueError("it holds no stamp")
    for number, stamp in enumerate(stamps):
        if not (0 <= stamp.launch < len(launches) and 0 <= stamp.stage < len(stages)):
            raise ValueError(f"stamp {number} is of a launch or stage that is not listed")
        if stamp.block < 0 or stamp.end_ns < stamp.begin_ns:
            raise ValueError(f"stamp {number} ends before it begins, or is of no block")
    plain_us, stamped_us = float(said["plain_us"]), float(said["stamped_us"])
    if not (plain_us > 0 and stamped_us > 0):
        raise ValueError("plain_us and stamped_us must be above 0")
    first = min(stamp.begin_ns for stamp in stamps)
    moved = [
        Stamp(s.launch, s.stage, s.block, s.begin_ns - first, s.end_ns - first) for s in stamps
    ]
    names = ("what", "model", "schedule", "tp", "gpus", "rows", "machine", "units")
    about = {name: said[name] for name in names}
    str(about["machine"]["gpu"])
    return Profile(about, launches, stages, moved, plain_us, stamped_us)


# --------------------------------------------------------------------- a table


@dataclass(frozen=True)
class Part:
    """A stage of a launch: of how many blocks, and how long."""

    launch: int
    stage: int
    blocks: int
    begin_us: float  # the first block's
    end_us: float  # the last block's
    median_us: float  # of the blocks' sums
    longest_us: float


def parts(profile: Profile) -> list[Part]:
    """By launch, and within it by when the first block begins."""
    found: dict[tuple[int, int], list[Stamp]] = {}
    for stamp in profile.stamps:
        found.setdefault((stamp.launch, stamp.stage), []).append(stamp)
    out = []
    for (launch, stage), stamps in found.items():
        sums: dict[int, float] = {}
        for stamp in stamps:
            sums[stamp.block] = sums.get(stamp.block, 0.0) + stamp.us
        begin, end = min(s.begin_ns for s in stamps), max(s.end_ns for s in stamps)
        times = (begin / 1000, end / 1000, median(sums.values()), max(sums.values()))
        out.append(Part(launch, stage, len(sums), *times))
    return sorted(out, key=lambda part: (part.launch, part.begin_us, part.stage))


def table(profile: Profile) -> Iterator[str]:
    yield title(profile)
    yield overhead_words(profile)
    yield f"{'':<26}{'blocks':>7}{'first':>9}{'last':>9}{'median':>9}{'longest':>9}  us"
    last = -1
    for part in parts(profile):
        if part.launch != last:
            yield profile.launches[part.launch]
            last = part.launch
        stage = profile.stages[part.stage]
        name = f"  {'wait ' if stage.waits else ''}{stage.name}"
        times = (part.begin_us, part.end_us, part.median_us, part.longest_us)
        yield f"{name:<26}{part.blocks:>7}" + "".join(f"{us:>9.2f}" for us in times)


def title(profile: Profile) -> str:
    about = profile.about
    case = f"{about['what']} {about['model']} {about['schedule']} tp{about['tp']}"
    return f"{case} T={about['rows']} on {about['gpus']} x {about['machine']['gpu']}"


def overhead_words(profile: Profile) -> str:
    plain, stamped = profile.plain_us, profile.stamped_us
    return (
        f"stamps cost {profile.overhead * 100:+.1f} %: {stamped:.2f} us a {profile.about['what']}"
        f" with them, {plain:.2f} us without"
    )


# --------------------------------------------------------------------- a picture


def picture(profile: Profile) -> str:
    """SVG: a lane a launch, a line a block, waits grey and work in the stage's colour."""
    end_us = profile.end_us
    scale = (WIDTH - LEFT - RIGHT) / max(end_us, 1e-3)
    height = TOP + len(profile.launches) * (LANE + GAP) + AXIS
    blocks = [0] * len(profile.launches)
    for stamp in profile.stamps:
        blocks[stamp.launch] = max(blocks[stamp.launch], stamp.block + 1)
    colours = stage_colours(profile)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title(profile))}</title>",
        "<style>.bg{fill:#fff}text{fill:#222}line{stroke:#ddd}"
        "@media(prefers-color-scheme:dark){.bg{fill:#181818}text{fill:#ddd}line{stroke:#444}}"
        "</style>",
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>',
        f'<text x="8" y="16" font-weight="bold">{escape(title(profile))}</text>',
        f'<text x="8" y="32">{escape(overhead_words(profile))}</text>',
        *legend(profile, colours),
    ]
    bottom = height - AXIS
    step = tick_step(end_us)
    for tick in range(int(end_us / step) + 1):
        x = LEFT + tick * step * scale
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        words = f"{tick * step:g}" + (" us" if tick == 0 else "")
        out.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{words}</text>')
    for launch, name in enumerate(profile.launches):
        y = TOP + launch * (LANE + GAP)
        out.append(f'<text x="8" y="{y + 14}">{escape(name)}</text>')
        out.append(f'<text x="8" y="{y + 28}" font-size="10">{blocks[launch]} blocks</text>')
        for part in parts_of(profile, launch):
            stage = profile.stages[part.stage]
            line = LANE / blocks[launch]
            path = "".join(
                f"M{LEFT + s.begin_ns * scale / 1000:.2f} {y + s.block * line:.2f}"
                f"h{(s.end_ns - s.begin_ns) * scale / 1000:.2f}v{line:.2f}"
                f"h-{(s.end_ns - s.begin_ns) * scale / 1000:.2f}z"
                for s in profile.stamps
                if s.launch == launch and s.stage == part.stage
            )
            words = (
                f"{name}: {'waits for ' if stage.waits else ''}{stage.name}, median"
                f" {part.median_us:.2f} us of {part.blocks} blocks"
            )
            out.append(
                f'<path fill="{colours[part.stage]}" d="{path}">'
                f"<title>{escape(words)}</title></path>"
            )
    out.append("</svg>\n")
    return "\n".join(out)


def parts_of(profile: Profile, launch: int) -> list[Part]:
    return [part for part in parts(profile) if part.launch == launch]


def stage_colours(profile: Profile) -> list[str]:
    colours, used = [], 0
    for stage in profile.stages:
        colours.append(WAIT_COLOUR if stage.waits else COLOURS[used % len(COLOURS)])
        used += 0 if stage.waits else 1
    return colours


def legend(profile: Profile, colours: list[str]) -> Iterator[str]:
    x = 8
    passed = {stamp.stage for stamp in profile.stamps}
    shown = [("waits", WAIT_COLOUR)]
    shown += [
        (stage.name, colours[idx])
        for idx, stage in enumerate(profile.stages)
        if not stage.waits and idx in passed
    ]
    for name, colour in shown:
        yield f'<rect x="{x}" y="40" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14}" y="49" font-size="11">{escape(name)}</text>'
        x += 26 + 6 * len(name)


def tick_step(end_us: float) -> float:
    """1, 2 or 5 times a power of ten, so that about ten fit."""
    step = 0.01
    while True:
        for factor in (1, 2, 5):
            if end_us / (factor * step) <= 14:
                return factor * step
        step *= 10


# --------------------------------------------------------------------- a trace


def trace(profile: Profile) -> dict[str, Any]:
    """Trace events, as Perfetto and chrome://tracing read them: a process a launch, a thread a
    block."""
    events: list[dict[str, Any]] = []
    for launch, name in enumerate(profile.launches):
        words = {"name": f"{launch:02d} {name}"}
        events.append({"ph": "M", "pid": launch, "name": "process_name", "args": words})
        order = {"sort_index": launch}
        events.append({"ph": "M", "pid": launch, "name": "process_sort_index", "args": order})
    for launch, block in sorted({(stamp.launch, stamp.block) for stamp in profile.stamps}):
        words = {"name": f"block {block}"}
        events.append(
            {"ph": "M", "pid": launch, "tid": block, "name": "thread_name", "args": words}
        )
    for stamp in profile.stamps:
        stage = profile.stages[stamp.stage]
        events.append(
            {
                "ph": "X",
                "pid": stamp.launch,
                "tid": stamp.block,
                "name": f"wait {stage.name}" if stage.waits else stage.name,
                "cat": "wait" if stage.waits else "compute",
                "ts": stamp.begin_ns / 1000,
                "dur": stamp.us,
            }
        )
    other = {**profile.about, "plain_us": profile.plain_us, "stamped_us": profile.stamped_us}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

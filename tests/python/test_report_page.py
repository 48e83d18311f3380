"""report.html as a browser shows it: no error, no request, every plot drawn, numbers as in
report.json, nothing wider than the screen."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lowlat.cli import engine, parts
from lowlat.cli.outcome import FaultError
from support import browser

ROOT = Path(__file__).resolve().parents[2]
REPLAY_BUDGET_S = 600
SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"), (320, "light")]
# A name that would break out of the page's markup if it could.
HOSTILE = "a'\"><img src=x onerror=document.title=1>&.json"

PLOTS = """
[...document.querySelectorAll('svg.plot')].map(svg => {
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('.mark')].map(mark => mark.getBoundingClientRect());
  const seen = marks.filter(mark => mark.width > 0 && mark.height > 0).length;
  return {figure: svg.closest('figure').id, width: box.width, height: box.height, seen};
})
"""
FIELDS = """
[...document.querySelectorAll('[data-field][data-value]')].map(item => ({
  field: item.dataset.field, value: item.dataset.value, text: item.textContent,
  drawn: item.namespaceURI.endsWith('svg'),
}))
"""
FIGURES = {
    "plot-users",
    "plot-rates",
    "plot-ttft",
    "plot-inter-token",
    "plot-acceptance",
    "plot-positions",
    "plot-target",
    "plot-draft",
    "plot-cache",
    "plot-timeline-0",
    "plot-timeline-1",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report of two traces, one of them with a hostile name."""
    try:
        binary = parts.installed_file(*engine.BINARY)
    except FaultError:
        pytest.skip("lowlat is not installed (make build)")
    folder = tmp_path_factory.mktemp("page")
    # A long word of a name, as a checkout deep in somebody's folders gives it.
    small = folder / ("deep" * 15) / "small.json"
    small.parent.mkdir()
    small.write_text((ROOT / "examples/traces/small.json").read_text())
    hostile = folder / HOSTILE.replace("/", "_")
    hostile.write_text(small.read_text())
    words = ["--limit-input", "96", "--limit-output", "6", "--sessions", "2"]
    subprocess.run(
        [binary, "replay", small, hostile, *words, "--report", folder / "out"],
        check=True,
        capture_output=True,
        timeout=REPLAY_BUDGET_S,
    )
    return folder / "out"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    path = browser.find()
    if path is None:
        pytest.skip(f"no browser ({', '.join(browser.NAMES)}) to open the page with")
    opened = browser.Browser(path, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def pointed(document: Any, pointer: str) -> Any:
    for name in pointer.split("/")[1:]:
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


def number(text: str) -> tuple[float, float]:
    """The number in a text as shown, in the unit of the report, and its last digit's worth."""
    found = re.match(r"\s*(-?[\d,]+(?:\.(\d+))?)\s*(ms|us|%)?", text)
    assert found is not None, text
    factor = {"ms": 1e-3, "us": 1e-6, "%": 1e-2, None: 1.0}[found[3]]
    return float(found[1].replace(",", "")) * factor, factor * 10.0 ** -len(found[2] or "")


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_page_is_whole_on_every_screen(
    report: Path, chromium: browser.Browser, width: int, scheme: str
) -> None:
    page = report / "report.html"
    chromium.open(page, width, scheme)
    told = [event for event in chromium.events if "method" in event]
    bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in told if event["method"] in bad] == []
    requests = [
        event["params"]["request"]["url"]
        for event in told
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert requests == [page.as_uri()]

    plots = chromium.ask(PLOTS)
    assert {plot["figure"] for plot in plots} == FIGURES
    for plot in plots:
        assert plot["width"] > 150 and plot["height"] > 10 and plot["seen"] > 0, plot
        assert plot["width"] <= width, plot
    assert chromium.ask("document.documentElement.scrollWidth") <= width
    paper = chromium.ask("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", paper)[:3]))
    assert (brightness < 384) == (scheme == "dark"), paper
    assert chromium.ask("document.title").startswith("Replay of 24 requests")
    assert chromium.ask("document.images.length + document.scripts.length") == 0


def test_numbers_are_those_of_report_json(report: Path, chromium: browser.Browser) -> None:
    chromium.open(report / "report.html", 1280, "light")
    document = json.loads((report / "report.json").read_text())
    fields = chromium.ask(FIELDS)
    assert len(fields) > 24 * 9
    for item in fields:
        expected = pointed(document, item["field"])
        assert float(item["value"]) == pytest.approx(expected, rel=1e-12), item
        if item["drawn"]:
            continue
        if "ms" not in item["text"] and "us" not in item["text"] and "%" not in item["text"]:
            # A tile has its unit in the element beside it.
            unit = chromium.ask(
                f"(document.querySelector('span[data-field=\"{item['field']}\"]') || {{}})"
                ".parentElement?.querySelector('.unit')?.textContent"
            )
            item["text"] += f" {unit or ''}"
        shown, digit = number(item["text"])
        assert abs(shown - expected) <= 0.5001 * digit, item
    assert (
        chromium.ask("document.querySelector('[data-text-field]').textContent")
        == (document["output_digest"])
    )


def test_a_hostile_name_is_text(report: Path, chromium: browser.Browser) -> None:
    chromium.open(report / "report.html", 1280, "light")
    labels = chromium.ask("[...document.querySelectorAll('.bar-label')].map(l => l.textContent)")
    assert any(label.endswith(HOSTILE.replace("/", "_")) for label in labels)

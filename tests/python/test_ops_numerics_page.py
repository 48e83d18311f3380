"""docs/numerics.md says what the library declares."""

import re
from pathlib import Path

from oracle.run import op_list

PAGE = Path(__file__).resolve().parents[2] / "docs/numerics.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def test_the_page_has_every_declared_bound():
    page = {(op, out): bound for op, out, bound in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    declared = {
        (op, out): bound.replace("|", "¦")
        for op, spec in op_list().items()
        for out, bound in spec["numerics"]["scalar"].items()
    }
    assert page == declared

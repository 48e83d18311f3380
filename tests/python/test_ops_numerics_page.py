"""docs/numerics.md says what the library declares."""

import re
from pathlib import Path

from oracle import MODELS
from oracle.run import op_list

PAGE = Path(__file__).resolve().parents[2] / "docs/numerics.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| `(\w+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def test_the_page_has_every_declared_bound():
    page = {}
    for op, models, output, bound in ROW.findall(PAGE.read_text(encoding="utf-8")):
        for model in MODELS if models == "both" else [models]:
            assert (op, model, output) not in page, f"{op}, {model}: {output} is there twice"
            page[op, model, output] = bound
    specs = {(model, op): spec for model in MODELS for op, spec in op_list(model).items()}
    platforms = {platform for spec in specs.values() for platform in spec["numerics"]}
    # One page for all: a build with CUDA declares the same of nvidia.
    assert platforms in ({"scalar"}, {"scalar", "nvidia"})
    for platform in platforms:
        declared = {
            (op, model, output): bound.replace("|", "¦")
            for (model, op), spec in specs.items()
            for output, bound in spec["numerics"][platform].items()
        }
        assert page == declared, platform

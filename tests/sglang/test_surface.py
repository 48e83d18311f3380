"""What lowlat touches in SGLang is what ``surface.py`` lists, no more and no less."""

import ast
from pathlib import Path

import lowlat
from lowlat import unwaited
from lowlat.surface import SURFACE

PACKAGE = Path(lowlat.__file__).parent.resolve()
# The contracts themselves, which need no excuse.
CONTRACTS = tuple(f"sglang.kernels.plugin_kernels.{vendor}.spec" for vendor in ("nvidia", "amd"))
# The command line's look at an installed SGLang reads its metadata and imports nothing.
# Commands and measuring programs run in processes of their own, never inside SGLang.
OTHERS = {"cli", "_bench"}
PLUGIN_FILES = sorted(path for path in PACKAGE.rglob("*.py") if not OTHERS & set(path.parts))


def names(tree):
    """Dotted names of everything imported from SGLang or torch and used by attribute."""
    found, aliases = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            head, _, rest = dotted.partition(".")
            if head in aliases:
                found.add(f"{aliases[head]}.{rest}")
    found = {name for name in found if name.startswith(("sglang.", "torch."))}
    # Of `a.b.c` the tree also holds `a.b`.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def touched():
    everything = set()
    for path in PLUGIN_FILES:
        everything |= names(ast.parse(path.read_text()))
    return {name for name in everything if not name.startswith(CONTRACTS)}


def test_the_list_is_what_the_code_touches() -> None:
    listed = {touch.symbol for touch in SURFACE if touch.symbol.startswith(("sglang.", "torch."))}
    assert touched() == listed


def test_what_is_touched_on_the_model_is_listed() -> None:
    """Attributes of the loaded model that the plugin's files read."""
    text = "\n".join(path.read_text() for path in PLUGIN_FILES)
    listed = " ".join(touch.symbol for touch in SURFACE)
    names = "named_parameters named_buffers named_modules quant_method logits_processor lm_head"
    for name in [*names.split(), "engram", "embed.rows", "engram_hasher", "core_attn_metadata"]:
        assert name in text and name in listed, name


def test_every_entry_says_why_and_what_would_let_it_go() -> None:
    for touch in SURFACE:
        assert touch.how in ("read", "call", "write", "hook")
        assert touch.why and touch.drop, touch.symbol


def test_nothing_but_the_engram_history_is_written_into_sglangs_objects() -> None:
    """Caches and the sampler's counter apart, which the contract has the step write."""
    written = [touch.symbol for touch in SURFACE if touch.how == "write"]
    assert written == ["model.model.engram_hasher: token_map, history"]


def test_one_function_of_sglangs_is_hooked() -> None:
    owner, name = unwaited.DRAFT_LISTING.rsplit(".", 2)[1:]
    hooked = [touch.symbol for touch in SURFACE if touch.how == "hook"]
    assert hooked == [f"{owner}.{name}: {unwaited.HOST_LENGTHS}"]
    text = "\n".join(path.read_text() for path in PLUGIN_FILES)
    assert text.count("registry.register(") == 1

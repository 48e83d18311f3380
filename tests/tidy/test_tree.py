"""What lies where: the top level, links between pages, tests beside sources, one version."""

import posixpath
import re
import sys
from pathlib import PurePosixPath

import tree

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

TOP_LEVEL = {
    ".ci",
    ".clang-format",
    ".gitignore",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CMakeLists.txt",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "Makefile",
    "README.md",
    "clippy.toml",
    "cpp_kernels",
    "docs",
    "examples",
    "pyproject.toml",
    "python",
    "rust_dispatch",
    "rustfmt.toml",
    "tests",
}
TEST_ROOMS = {
    "cpp",
    "rust",
    "python",
    "sglang",
    "cross",
    "golden",
    "fakes",
    "fuzz",
    "gpu",
    "tidy",
    "tools",
}
ENDINGS = {  # a file's ending says who can read it
    "cpp_kernels/include": {".h"},
    "cpp_kernels/stages": {".hpp"},
    "cpp_kernels/shape": {".hpp"},
    "cpp_kernels/platform": {".hpp", ".cuh"},
    "cpp_kernels/host": {".hpp", ".cpp", ".cuh", ".cu", ".hip"},
    "cpp_kernels/reference": {".hpp", ".cpp"},
}


def test_the_top_level_holds_only_what_belongs() -> None:
    seen = {PurePosixPath(name).parts[0] for name in tree.files()}
    tree.none([f"{name}: does not belong at the top level" for name in sorted(seen - TOP_LEVEL)])


def test_the_tests_have_their_rooms() -> None:
    seen = {PurePosixPath(name).parts[1] for name in tree.under("tests")}
    tree.none([f"tests/{name}: no such room" for name in sorted(seen - TEST_ROOMS)])


def test_endings_say_who_can_read_a_file() -> None:
    complaints = []
    for folder, endings in ENDINGS.items():
        for name in tree.under(folder):
            if PurePosixPath(name).suffix not in endings:
                complaints.append(f"{name}: {folder} holds {', '.join(sorted(endings))} only")
    tree.none(complaints)


def test_nothing_built_is_committed() -> None:
    suffixes = (".so", ".o", ".a", ".pyc", ".whl", ".npz")
    tree.none([f"{name}: built or made" for name in tree.files() if name.endswith(suffixes)])


def anchor(heading: str) -> str:
    """The link target that a page's heading gets."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def test_links_of_pages_lead_somewhere() -> None:
    complaints = []
    for name in tree.files():
        if not name.endswith(".md"):
            continue
        prose = re.sub(r"^```.*?^```", "", tree.read(name), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"https?:|mailto:", target):
                continue
            path, _, fragment = target.partition("#")
            page = (tree.ROOT / name).parent / path if path else tree.ROOT / name
            if not page.exists():
                complaints.append(f"{name}: link to {target}, which is not there")
            elif fragment and page.suffix == ".md":
                headings = re.findall(r"^#+\s+(.*)$", page.read_text(), re.MULTILINE)
                if fragment not in map(anchor, headings):
                    complaints.append(f"{name}: link to {target}; the page has no such heading")
    tree.none(complaints)


def test_the_votes_properties_name_tests_that_are_there() -> None:
    names = tree.under("tests/rust", suffixes=(".rs",))
    tests = "".join(tree.read(name) for name in names)
    complaints = []
    for name in ("rust_dispatch/core/src/vote/mod.rs", "rust_dispatch/host/src/lib.rs"):
        page = "".join(re.findall(r"^//! ?(.*\n)", tree.read(name), re.MULTILINE))
        properties = page.partition("# Properties")[2].partition("\n# ")[0]
        named = set(re.findall(r"`([a-z]\w+_\w+_\w+)`", properties))
        if len(named) < 5:
            complaints.append(f"{name}: names {len(named)} tests beside its properties")
        for test in sorted(named):
            if f"fn {test}()" not in tests and f"tests/rust/{test}.rs" not in names:
                complaints.append(f"{name}: no test {test}")
    tree.none(complaints)


def test_every_page_is_reached_from_the_index() -> None:
    reached, todo = set(), ["docs/index.md"]
    while todo:
        page = todo.pop()
        if page in reached or page not in tree.files():
            continue
        reached.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", tree.read(page)):
            todo.append(posixpath.normpath(f"{PurePosixPath(page).parent}/{target}"))
    pages = tree.under("docs", suffixes=(".md",))
    tree.none([f"{page}: no way from docs/index.md" for page in pages if page not in reached])


def test_architecture_names_every_room() -> None:
    page = tree.read("ARCHITECTURE.md")
    rooms = {
        "/".join(PurePosixPath(name).parts[:2]) + "/"
        for name in tree.under("rust_dispatch", "cpp_kernels", "tests")
        if len(PurePosixPath(name).parts) > 2
    }
    tree.none([f"ARCHITECTURE.md does not name {room}" for room in rooms if room not in page])


def test_there_is_one_version() -> None:
    version = tomllib.loads(tree.read("Cargo.toml"))["workspace"]["package"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    complaints = []
    for name in tree.files():
        if PurePosixPath(name).name == "Cargo.toml" and name != "Cargo.toml":
            package = tomllib.loads(tree.read(name))["package"]
            if package["version"] != {"workspace": True}:
                complaints.append(f"{name}: version.workspace = true")
        if PurePosixPath(name).name == "pyproject.toml":
            project = tomllib.loads(tree.read(name))["project"]
            if "version" in project or "version" not in project.get("dynamic", []):
                complaints.append(f"{name}: the version is read from Cargo.toml (dynamic)")
    if not re.search(r"project\(lowlat VERSION \$\{_version\}", tree.read("CMakeLists.txt")):
        complaints.append("CMakeLists.txt: the version is read from Cargo.toml")
    lock = tomllib.loads(tree.read("Cargo.lock"))
    for package in lock["package"]:
        if package["name"].startswith("lowlat-") and package["version"] != version:
            complaints.append(f"Cargo.lock: {package['name']} is {package['version']}")
    tree.none(complaints)


def test_the_changelog_has_an_unreleased_part() -> None:
    assert re.search(r"^## \[?Unreleased\]?$", tree.read("CHANGELOG.md"), re.MULTILINE)


def test_listed_fused_kernels_are_in_the_sources() -> None:
    listed = re.findall(
        r'^    \{"(\w+)",', tree.read("cpp_kernels/fused/instances.hpp"), re.MULTILINE
    )
    sources = " ".join(
        tree.read(name) for name in tree.under("cpp_kernels/fused", suffixes=(".cu", ".cuh"))
    )
    kernels = re.findall(r"__global__\s+void\s+(?:__\w+__\([^;{]*?\)\s+)?(\w+_sm90)\(", sources)
    tree.none([f"{name} is listed and no kernel" for name in listed if name not in kernels])


# ------------------------------------------------------------------ mirrors

# A source (or a folder of sources) whose test is not of its own name, and where that test is. What
# a stage gives as an operation of the C ABI is tested by the operation.
TESTED_ELSEWHERE: dict[str, str] = {
    "cpp_kernels/bench/model_config.hpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/fused/codes.hpp": "tests/gpu/test_step.cu",
    "cpp_kernels/fused/draft.hpp": "tests/gpu/test_draft.cu",
    "cpp_kernels/fused/draft_accept.hpp": "tests/gpu/test_draft_accept.cu",
    "cpp_kernels/fused/inject.hpp": "tests/gpu/test_step.cu",
    "cpp_kernels/fused/instances.hpp": "tests/tidy/test_tree.py",
    "cpp_kernels/fused/moe.hpp": "tests/gpu/test_moe.cu",
    "cpp_kernels/fused/step.hpp": "tests/gpu/test_step.cu",
    "cpp_kernels/host/how_to_build.hpp": "tests/cpp/host/op/test_registry.cpp",
    "cpp_kernels/host/amd/": "tests/cpp/host/test_amd_model.cpp",
    "cpp_kernels/host/api.cpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/checks.hpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/config.cpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/device_model.hpp": "tests/cpp/host/test_amd_model.cpp",
    "cpp_kernels/host/nvidia/": "tests/gpu/test_ops.cu",
    "cpp_kernels/host/op/rope_tables.hpp": "tests/cpp/host/op/test_models.cpp",
    "cpp_kernels/host/op/pooling.hpp": "tests/cpp/host/op/test_ops_attention.cpp",
    "cpp_kernels/host/peer.cpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/peer.hpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/plain.cpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/plain.hpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/platforms.cpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/region.cpp": "tests/cpp/host/test_amd_model.cpp",
    "cpp_kernels/host/region.hpp": "tests/cpp/host/test_amd_model.cpp",
    "cpp_kernels/host/rope_frequencies.cpp": "tests/cpp/persistent/test_program.cpp",
    "cpp_kernels/host/rope_frequencies.hpp": "tests/cpp/persistent/test_program.cpp",
    "cpp_kernels/host/scalar_model.cpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/scalar_model.hpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/tensors.cpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/host/worker.hpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/include/lowlat/kernels.h": "tests/cross/kernels_layout.rs",
    "cpp_kernels/persistent/": "tests/cpp/persistent/test_program.cpp",
    "cpp_kernels/platform/amd.hpp": "tests/python/test_amd_code.py",
    "cpp_kernels/platform/amd_host.hpp": "tests/cpp/host/test_amd_model.cpp",
    "cpp_kernels/platform/amd_mfma.hpp": "tests/python/test_amd_code.py",
    "cpp_kernels/platform/amd_tile.hpp": "tests/python/test_amd_stages.py",
    "cpp_kernels/platform/amd_types.hpp": "tests/cpp/host/test_amd_model.cpp",
    "cpp_kernels/platform/contract.hpp": "tests/cpp/platform/test_scalar.cpp",
    "cpp_kernels/platform/cpu.hpp": "tests/cpp/platform/test_scalar.cpp",
    "cpp_kernels/platform/nvidia.hpp": "tests/gpu/test_platform.cu",
    "cpp_kernels/platform/tile_plain.hpp": "tests/cpp/stages/test_tile.cpp",
    "cpp_kernels/platform/tile_types.hpp": "tests/cpp/stages/test_tile.cpp",
    "cpp_kernels/py/hosted.cpp": "tests/sglang/test_forward.py",
    "cpp_kernels/py/hosted.hpp": "tests/sglang/test_forward.py",
    "cpp_kernels/py/status.hpp": "tests/python/test_kernels.py",
    "cpp_kernels/py/kernels_module.cpp": "tests/python/test_kernels.py",
    "cpp_kernels/py/watch.cpp": "tests/python/test_watch.py",
    "python/lowlat/env.py": "tests/python/test_watch.py",
    "cpp_kernels/py/watch.hpp": "tests/python/test_watch.py",
    # Programs that need a GPU, with a `check` of their own.
    "cpp_kernels/bench/attn_bench.hpp": "tests/gpu/test_attention.cu",
    "cpp_kernels/bench/attn_layer.hpp": "tests/gpu/test_attention.cu",
    "cpp_kernels/fused/attention.hpp": "tests/gpu/test_attention.cu",
    "cpp_kernels/fused/attention_wide.hpp": "tests/gpu/test_attention.cu",
    "cpp_kernels/fused/compress.hpp": "tests/gpu/test_index.cu",
    "cpp_kernels/fused/engram.hpp": "tests/gpu/test_index.cu",
    "cpp_kernels/bench/measure_layer_scalar.cpp": "tests/python/test_cli_bench.py",
    "cpp_kernels/bench/model_layers.hpp": "tests/python/test_cli_bench.py",
    "cpp_kernels/bench/exchange_ranks.hpp": "cpp_kernels/bench/exchange_hopper.cu",
    "cpp_kernels/bench/peers.hpp": "tests/gpu/test_layer.cu",
    "cpp_kernels/bench/processes.hpp": "cpp_kernels/bench/exchange_hopper.cu",
    "cpp_kernels/fused/exchange.hpp": "cpp_kernels/bench/exchange_hopper.cu",
    "cpp_kernels/fused/exchange_gate.hpp": "tests/gpu/test_layer.cu",
    "cpp_kernels/fused/exchange_hop.hpp": "tests/gpu/test_layer.cu",
    "cpp_kernels/fused/front.hpp": "tests/gpu/test_attention.cu",
    "cpp_kernels/fused/index.hpp": "tests/gpu/test_index.cu",
    "cpp_kernels/fused/layer.hpp": "tests/gpu/test_layer.cu",
    "cpp_kernels/bench/plain_layers.hpp": "tests/cpp/host/test_amd_model.cpp",
    "cpp_kernels/fused/layer_beside.hpp": "tests/gpu/test_layer_v4.cu",
    "cpp_kernels/fused/layer_pooled.hpp": "tests/gpu/test_layer_v4.cu",
    "cpp_kernels/fused/exchange_mix.hpp": "tests/gpu/test_attention_v4.cu",
    "cpp_kernels/fused/exchange_mix_wide.hpp": "tests/gpu/test_attention_v4.cu",
    "cpp_kernels/fused/model.hpp": "tests/gpu/test_attention_v4.cu",
    "cpp_kernels/bench/layer_stamps.hpp": "cpp_kernels/bench/layer.cu",
    "cpp_kernels/fused/mix.hpp": "tests/gpu/test_attention.cu",
    "cpp_kernels/fused/oproj.hpp": "tests/gpu/test_attention.cu",
    "cpp_kernels/fused/stamps.hpp": "tests/cpp/bench/test_stamps_file.cpp",
    "cpp_kernels/reference/": "tests/python/test_ops_random.py",
    "cpp_kernels/shape/runtime_shape.hpp": "tests/cpp/host/test_model.cpp",
    "cpp_kernels/shape/dsv41_flash.hpp": "tests/python/test_ops_constants.py",
    "cpp_kernels/shape/dsv4_flash.hpp": "tests/cpp/shape/test_bytes.cpp",
    "cpp_kernels/stages/format.hpp": "tests/cpp/host/op/test_ops_rope_kv.cpp",
    "cpp_kernels/stages/hc.hpp": "tests/cpp/host/op/test_ops_mix.cpp",
    "cpp_kernels/stages/kv.hpp": "tests/cpp/host/op/test_ops_rope_kv.cpp",
    "cpp_kernels/stages/linear.hpp": "tests/cpp/host/op/test_ops_linear.cpp",
    "cpp_kernels/stages/norm.hpp": "tests/cpp/host/op/test_ops_mix.cpp",
    "cpp_kernels/stages/rank_sum.hpp": "tests/cpp/host/op/test_ops_mix.cpp",
    "cpp_kernels/stages/rope.hpp": "tests/cpp/host/op/test_ops_rope_kv.cpp",
    "cpp_kernels/stages/sum.hpp": "tests/cpp/host/op/test_ops_mix.cpp",
    "cpp_kernels/stages/wait.hpp": "tests/cpp/stages/test_exchange.cpp",
    "python/lowlat/__init__.py": "tests/python/test_package.py",
    "python/lowlat/__main__.py": "tests/python/test_package.py",
    "python/lowlat/cli/__init__.py": "tests/python/test_cli_main.py",
    "python/lowlat/cli/files.py": "tests/python/test_cli_npz.py",
    "python/lowlat/cli/measure.py": "tests/python/test_cli_bench.py",
    "python/lowlat/cli/outcome.py": "tests/python/test_cli_main.py",
    "python/lowlat/cli/parts.py": "tests/python/test_package.py",
    "python/lowlat/build.py": "tests/sglang/test_install.py",
    "python/lowlat/capture.py": "tests/sglang/test_install.py",
    "python/lowlat/config.py": "tests/sglang/test_resolution.py",
    "python/lowlat/kernels.py": "tests/sglang/test_forward.py",
    "python/lowlat/guard.py": "tests/sglang/test_resolution.py",
    "python/lowlat/models/": "tests/sglang/test_models.py",
    "python/lowlat/plugin.py": "tests/sglang/test_discovery.py",
    "python/lowlat/reasons.py": "tests/sglang/test_install.py",
    "python/lowlat/replay.py": "tests/sglang/test_forward.py",
    "python/lowlat/specs/": "tests/sglang/test_resolution.py",
    "python/lowlat/surface.py": "tests/sglang/test_surface.py",
    "python/lowlat/unwaited.py": "tests/sglang/test_unwaited.py",
    "rust_dispatch/capi/header.rs": "tests/rust/capi_header.rs",
    "rust_dispatch/capi/examples/make_header.rs": "tests/rust/capi_header.rs",
    "rust_dispatch/capi/src/": "tests/cpp/capi_bad_input.c",
    "rust_dispatch/core/src/sync.rs": "tests/rust/core_vote_threads.rs",
    "rust_dispatch/engine/src/bench/mod.rs": "tests/rust/engine_bench.rs",
    "rust_dispatch/engine/src/bench/votes.rs": "tests/rust/engine_bench.rs",
    "rust_dispatch/engine/src/bin/lowlat-engine.rs": "tests/rust/engine_commands.rs",
    "rust_dispatch/engine/src/checkpoint/make.rs": "tests/rust/engine_checkpoint.rs",
    "rust_dispatch/engine/src/kernels/": "tests/rust/engine_kernels.rs",
    "rust_dispatch/host/src/futex.rs": "tests/rust/host_group.rs",
    "rust_dispatch/host/src/memory.rs": "tests/rust/host_group.rs",
    "rust_dispatch/py/src/": "tests/python/test_dispatch.py",
}


def is_tested_elsewhere(name: str) -> bool:
    return any(
        name == source or (source.endswith("/") and name.startswith(source))
        for source in TESTED_ELSEWHERE
    )


def cpp_mirrors(name: str) -> list[str]:
    """stages/norm.hpp: tests/cpp/stages/test_norm.cpp, test_norm_tsan.cpp, test_norm_more.cpp."""
    path = PurePosixPath(name).relative_to("cpp_kernels")
    start = f"tests/cpp/{path.parent}/test_{path.stem}"
    return [
        test
        for test in tree.under("tests/cpp")
        if test.startswith((f"{start}.", f"{start}_")) and test.endswith((".cpp", ".c"))
    ]


def rust_mirrors(name: str) -> list[str]:
    """Tests at the file's own foot or in its folder's tests.rs, running examples, or a test in
    tests/ of the crate's name that uses the module by its path."""
    text = tree.read(name)
    beside = str(PurePosixPath(name).with_name("tests.rs"))
    if re.search(r"^\s*#\[cfg\((all\()?test", text, re.MULTILINE) or "/// ```\n" in text:
        return [name]
    if beside in tree.files():
        return [beside]
    crate, _, *modules = PurePosixPath(name).with_suffix("").parts[1:]
    path = "::".join([f"lowlat_{crate}", *(part for part in modules if part != "mod")])
    return [
        test
        for test in tree.under("tests/rust", "tests/cross", suffixes=(".rs",))
        if re.search(rf"\b{path}\b", tree.read(test))
    ]


def python_mirrors(name: str) -> list[str]:
    """cli/op.py: tests/python/test_cli_op.py."""
    path = PurePosixPath(name).relative_to("python/lowlat").with_suffix("")
    return [f"tests/python/test_{'_'.join(path.parts)}.py"]


def is_list_of_modules(name: str) -> bool:
    """A lib.rs or mod.rs that only names modules has nothing to test."""
    code = tree.rust_without_tests(name)
    return PurePosixPath(name).name in ("lib.rs", "mod.rs") and not re.search(r"\bfn\b", code)


def test_every_source_has_a_test_of_its_name() -> None:
    sources = [
        *((name, cpp_mirrors) for name in tree.under("cpp_kernels", suffixes=(".hpp", ".cpp"))),
        *((name, rust_mirrors) for name in tree.under("rust_dispatch", suffixes=(".rs",))),
        *((name, python_mirrors) for name in tree.under("python/lowlat", suffixes=(".py",))),
    ]
    complaints = []
    for name, mirrors in sources:
        if is_tested_elsewhere(name) or (name.endswith(".rs") and is_list_of_modules(name)):
            continue
        if not any(test in tree.files() for test in mirrors(name)):
            complaints.append(f"{name}: no test of its name (or name one in TESTED_ELSEWHERE)")
    tree.none(complaints)


def test_tests_named_for_another_source_exist() -> None:
    complaints = []
    for source, test in TESTED_ELSEWHERE.items():
        there = tree.under(source.rstrip("/")) if source.endswith("/") else source in tree.files()
        if not there:
            complaints.append(f"{source} is not there")
        if test not in tree.files():
            complaints.append(f"{test} is not there")
    tree.none(complaints)

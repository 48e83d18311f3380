"""The entry point: found by SGLang's loader, filtered by name, cheap, and harmless where SGLang
has no contract for it.
"""

import json
import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from lowlat import plugin
from served import refusal
from sglang.kernels.plugin_kernels.nvidia import spec
from sglang.srt.environ import envs
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group

IMPORT_BUDGET_S = 300


def test_the_package_installs_the_entry_point() -> None:
    found = {ep.name: ep.value for ep in entry_points(group=GENERAL_PLUGINS_GROUP)}
    assert found[spec.ENTRY_POINT] == "lowlat.plugin:register_nvidia"
    assert found["amd_monokernel"] == "lowlat.plugin:register_amd"


def test_the_loader_registered_both_models() -> None:
    assert spec.registered_architectures() == sorted(plugin.SPECS)
    for architecture, path in plugin.SPECS.items():
        found, why = spec.find_spec(architectures=[architecture], isa="sm_90")
        assert found is not None and not why, (architecture, path, why)


def test_registering_again_changes_nothing() -> None:
    plugin.register_nvidia()
    assert spec.registered_architectures() == sorted(plugin.SPECS)


def test_another_plugin_of_the_same_models_is_an_error() -> None:
    with pytest.raises(ValueError, match="already registered: lowlat"):
        spec.register(architecture="DeepseekV4ForCausalLM", path="other.plugin:SPEC")


@pytest.mark.parametrize(
    ("allowed", "loaded"),
    [
        ("", True),
        ("nvidia_megakernel", True),
        (" a, nvidia_megakernel ", True),
        ("something_else", False),
    ],
)
def test_the_filter_of_plugins_is_obeyed(allowed, loaded) -> None:
    with envs.SGLANG_PLUGINS.override(allowed):
        assert (spec.ENTRY_POINT in load_plugins_by_group(GENERAL_PLUGINS_GROUP)) is loaded


def test_a_filtered_plugin_with_the_flag_on_is_refused(gpu, checkpoint) -> None:
    with envs.SGLANG_PLUGINS.override("something_else"):
        (line,) = refusal(checkpoint("v41-flash"))
    assert line == "SGLANG_PLUGINS='something_else' does not list the 'nvidia_megakernel' plugin"


def test_an_sglang_before_the_contract_gets_a_line_and_no_error(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "sglang.kernels.plugin_kernels.nvidia.spec", None)
    with caplog.at_level(logging.INFO, logger="lowlat.plugin"):
        plugin.register_nvidia()
    assert "no kernel-plugin contract" in caplog.text


def test_with_the_flag_off_only_the_entry_point_is_imported() -> None:
    """In a process of its own, as each of a server's processes loads plugins."""
    code = (
        "import json, sys; from sglang.srt.plugins import load_plugins; load_plugins();"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] == 'lowlat']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=IMPORT_BUDGET_S,
    )
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == ["lowlat", "lowlat.plugin"]

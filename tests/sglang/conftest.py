"""Tests of the plugin against the unmodified SGLang package, on a machine without a GPU.

They run in a virtual environment of their own (``make test-sglang``). What a GPU would answer is
set here; everything else of SGLang is its own code.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from lowlat import _dispatch, guard
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.plugins import load_plugins

# Plugins load once a process, by their installed entry points.
load_plugins()

HOPPER_BLOCKS = 132


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU as SGLang's binding asks for one; its answers can be changed."""
    answers = SimpleNamespace(isa="sm_90", blocks=HOPPER_BLOCKS, capturing=False)

    def properties(device=None):
        return SimpleNamespace(multi_processor_count=answers.blocks)

    monkeypatch.setattr(binding, "device_isa", lambda: answers.isa)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 141 << 30))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers.capturing)
    return answers


@pytest.fixture
def kernels_there(monkeypatch):
    """As if the installed library had NVIDIA kernels."""
    monkeypatch.setattr(guard, "kernels_reasons", lambda: [])


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint folder that holds a built-in model's true configuration, changed."""

    def make(name, **changes):
        config = json.loads(_dispatch.built_in(name))
        for field, value in changes.items():
            if value is None:
                del config[field]
            else:
                config[field] = value
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make

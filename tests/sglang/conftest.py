"""Tests of the plugin against the unmodified SGLang package, on a machine without a GPU.

They run in a virtual environment of their own (``make test-sglang``). What a GPU would answer is
set here; everything else of SGLang is its own code.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from lowlat import _dispatch, guard
from sglang.srt.kernel_plugins.amd import binding as amd_binding
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.plugins import load_plugins

# Plugins load once a process, by their installed entry points.
load_plugins()

HOPPER_BLOCKS, CDNA4_BLOCKS = 132, 256


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU as SGLang's binding asks for one; its answers can be changed."""
    return answering(monkeypatch, binding, "sm_90", HOPPER_BLOCKS)


@pytest.fixture
def amd_gpu(monkeypatch):
    """A gfx950 GPU likewise, and no NVIDIA one."""
    monkeypatch.setattr(binding, "device_isa", lambda: None)
    return answering(monkeypatch, amd_binding, "gfx950", CDNA4_BLOCKS)


def answering(monkeypatch, binding, isa, blocks):
    answers = SimpleNamespace(isa=isa, blocks=blocks, capturing=False)

    def properties(device=None):
        return SimpleNamespace(multi_processor_count=answers.blocks)

    monkeypatch.setattr(binding, "device_isa", lambda: answers.isa)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 141 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers.capturing)
    return answers


@pytest.fixture
def kernels_there(monkeypatch):
    """As if the installed library had the GPU's kernels."""
    monkeypatch.setattr(guard, "kernels_reasons", lambda *_: [])


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

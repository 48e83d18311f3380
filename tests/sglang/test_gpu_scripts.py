"""What the scripts for a GPU (tests/gpu/sglang) measure with, on the CPU: weights by hashes, inputs
a rounding beside, features of every layer. (Proved by hashes that begin at 0 in every part, and by
a forward that stays replaced.)
"""

import sys
from pathlib import Path

import pytest
import torch

ROOM = Path(__file__).resolve().parents[1] / "gpu" / "sglang"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOM))
    try:
        import dummy_weights
        import engine
        import lowlat_few_gpus
    finally:
        sys.path.remove(str(ROOM))
    return dummy_weights, lowlat_few_gpus, engine


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.3.mlp.experts.w13_weight", torch.int8, (6, 8, 64)),
        ("layers.3.self_attn.wq_b.weight", torch.float8_e4m3fn, (6, 8, 64)),
        ("layers.3.self_attn.wo_a.weight", torch.bfloat16, (6, 8, 64)),
        ("layers.3.hc_attn_fn", torch.float32, (6, 8, 64)),
    ],
)
def test_a_part_of_a_tensor_is_what_the_whole_has_there(scripts, name, dtype, shape) -> None:
    dummy_weights = scripts[0]
    whole, part = torch.empty(shape, dtype=dtype), torch.empty(shape[1:], dtype=dtype)
    dummy_weights.fill(name, whole)
    dummy_weights.fill(name, part, first=4 * part.numel())
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (whole[4], part, whole[3])]
    assert torch.equal(as_bytes[0], as_bytes[1]) and not torch.equal(as_bytes[0], as_bytes[2])


def test_weights_do_not_depend_on_the_dtype_that_a_model_is_loaded_with(scripts) -> None:
    dummy_weights = scripts[0]
    both = [torch.empty(4, 512, dtype=torch.float32) for _ in range(2)]
    dummy_weights.fill("hc_attn_fn", both[0])
    dummy_weights.quantiles.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        dummy_weights.fill("hc_attn_fn", both[1])
    finally:
        torch.set_default_dtype(torch.float32)
        dummy_weights.quantiles.cache_clear()
    assert torch.equal(*both)


def test_values_a_rounding_beside_are_neighbours(scripts) -> None:
    few_gpus = scripts[1]
    values = torch.randn(24, 4096).bfloat16()
    values[0, :8] = 0.0
    moved = few_gpus.a_rounding_beside(values)
    steps = moved.view(torch.int16).int() - values.view(torch.int16).int()
    assert set(steps.unique().tolist()) == {-1, 0, 1}
    assert 0.05 < float((steps != 0).float().mean()) < 0.075
    assert torch.equal(moved[0, :8], values[0, :8]) and not moved.isnan().any()


class Inner(torch.nn.Module):
    """As SGLang's model: features of the layers that the draft reads, each its number here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(5))
        self.dspark_layers_to_capture = [2, 4]

    def forward(self, hidden):
        parts = [hidden + layer for layer in self.dspark_layers_to_capture]
        return (hidden, hidden), torch.cat(parts, -1)


def test_every_layers_features_come_beside_what_a_forward_gives(scripts) -> None:
    few_gpus = scripts[1]
    inner, hidden = Inner(), torch.zeros(3, 7)
    _, before = inner.forward(hidden)
    with few_gpus.every_layer(inner) as found:
        _, features = inner.forward(hidden)
    assert torch.equal(features, before)
    assert found[0].shape == (3, 5, 7) and found[0][0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(inner.forward(hidden)[1], before) and len(found) == 1


def test_differences_beyond_the_bounds_are_told(scripts, capsys) -> None:
    few_gpus, engine = scripts[1:]
    step = dict(mode="target_verify", rows=6, best=1.0, moved_best=1.0, again_logits=[0.0, 0.0])
    near = step | dict(logits=[0.07, 0.1], moved_logits=[0.08, 0.1], layers=[0.0], moved_layers=[1])

    def log(words) -> str:
        return f"[now] {few_gpus.BESIDE}{engine.json.dumps(words)}\n"

    assert engine.beside(log(near))
    assert not engine.beside("nothing beside")
    assert not engine.beside(log(near | {"layers": [1.3]}))
    assert not engine.beside(log(near | {"layers": [float("nan")]}))
    assert not engine.beside(log(near | {"logits": [0.11, 0.2], "moved_logits": [0.1, 0.2]}))
    assert capsys.readouterr().out.count("TOO FAR") == 2

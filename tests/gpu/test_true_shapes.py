"""Every operation on the platform nvidia at the models' own sizes, against ``reference``.

Sizes are one rank's of four: the true lengths of every sum, and of weights as many rows or experts
as float64 gets through in seconds. Shapes run at a verify step's rows and, where it is quick, at
the fewest and the most. ``python -m pytest tests/gpu``,
or ``make gpu-test``; skipped where no device runs the library.
"""

import numpy as np
import pytest
from oracle import MODELS
from oracle.cases import SHAPES, make
from oracle.compare import check_declared
from oracle.run import COMPUTED, bounds, run

pytestmark = pytest.mark.skipif(
    "nvidia" not in COMPUTED, reason="no device here runs the platform nvidia (lowlat doctor)"
)

ROWS = (1, 6, 48)
V41 = {
    "hc_stats": [dict(T=T, H=5120) for T in ROWS],
    "hc_combine_norm": [dict(T=T, H=5120) for T in ROWS],
    "hc_post": [dict(T=T, H=5120) for T in ROWS],
    "rms_norm": [dict(T=T, H=5120) for T in ROWS] + [dict(T=6, H=1280)],
    "rank_sum": [dict(R=R, T=48, H=5120) for R in (2, 4, 8)],
    "block_linear": [
        dict(T=6, N=1792, K=5120),  # wq_a and wkv
        dict(T=48, N=2048, K=1280),  # wq_b
        dict(T=6, N=5120, K=2048),  # wo_b
        dict(T=6, N=1280, K=15360),  # main_proj
    ],
    "lm_head": [dict(T=6, V=8192, H=5120)],
    "rope": [dict(T=48, h=16, D=512, yarn=1), dict(T=6, h=16, D=512, inverse=1)],
    "kv_pack": [dict(T=48)],
    "kv_unpack": [dict(T=48)],
    "sparse_attention": [
        dict(T=6, h=16, S=4096, s=128, E=8192, n=512),
        dict(T=48, h=16, S=512, s=133, E=4, n=0),
        dict(T=1, h=64, S=4096, s=128, E=8192, n=512),
    ],
    "compress": [dict(L=12, H=5120, ratio=1), dict(L=13, H=5120, ratio=2)],
    "index_query": [dict(T=48, h=32)],
    "index_key": [dict(T=48)],
    "index_select": [dict(T=6, h=32, N=8000, k=512), dict(T=6, h=32, N=9000, k=512, M=200)],
    "candidate_blocks": [dict(T=6, N=20000, k=1024), dict(T=48, N=9000, k=64)],
    "gate": [dict(T=T, H=5120, E=384) for T in ROWS] + [dict(T=6, H=5120, E=128, k=3)],
    "experts": [
        dict(T=6, E=48, H=5120, I=576),
        dict(T=48, E=8, H=5120, I=96),
        dict(T=5, E=16, H=5120, I=576, k=3),
    ],
    "engram_hash": [dict(T=48, V=129280)],
    "engram_lookup": [dict(T=48, rows=100000, D=256)],
    "engram_apply": [dict(T=2, H=5120, D=256)],
    "markov_draft": [dict(B=4, g=5, V=129280, R=256)],
    "accept": [dict(B=4, g=5, V=129280)],
}
V4 = {
    "hc_stats": [dict(T=6, H=4096)],
    "hc_combine_norm": [dict(T=6, H=4096)],
    "hc_post": [dict(T=6, H=4096)],
    "hc_head": [dict(T=T, H=4096) for T in ROWS],
    "rms_norm": [dict(T=6, H=4096)],
    "head_norm": [dict(T=48, h=16)],
    "rank_sum": [dict(R=4, T=6, H=4096)],
    "block_linear": [
        dict(T=6, N=1536, K=4096, b=128),
        dict(T=48, N=2048, K=1024, b=128),
        dict(T=6, N=4096, K=2048, b=128),
    ],
    "lm_head": [dict(T=6, V=8192, H=4096)],
    "rope": [dict(T=6, h=16, D=512, yarn=1)],
    "kv_pack": [dict(T=6)],
    "kv_unpack": [dict(T=6)],
    "sparse_attention": [dict(T=6, h=16, S=4096, s=128, E=8192, n=512)],
    "compress": [dict(L=27, H=4096, ratio=4), dict(L=130, H=4096, ratio=128)],
    "index_query": [dict(T=48, h=64)],
    "index_key": [dict(L=27, H=4096)],
    "index_select": [dict(T=6, h=64, N=8000, k=512)],
    "gate": [dict(T=6, H=4096, E=256)],
    "hash_gate": [dict(T=T, V=1000, H=4096, E=256) for T in ROWS],
    "experts": [dict(T=6, E=32, H=4096, I=512, b=128)],
    "markov_draft": [dict(B=1, g=5, V=129280, R=256)],
    "accept": [dict(B=1, g=5, V=129280)],
}
TRUE_SHAPES = {"v41": V41, "v4": V4}
CASES = [
    pytest.param(
        model, op, shape, id=f"{model}-{op}-" + "-".join(f"{k}{v}" for k, v in shape.items())
    )
    for model in MODELS
    for op, shapes in TRUE_SHAPES[model].items()
    for shape in shapes
]


@pytest.mark.parametrize("model", MODELS)
def test_every_operation_has_a_true_shape(model):
    assert set(TRUE_SHAPES[model]) == set(SHAPES[model])


@pytest.mark.parametrize("model, op, shape", CASES)
def test_nvidia_is_within_its_declared_bounds(model, op, shape):
    arrays = make(op, 11, model, **shape)
    want = run(op, "reference", arrays, model)
    got = run(op, "nvidia", arrays, model)
    check_declared(op, arrays, got, want, bounds(op, "nvidia", model), model)
    again = run(op, "nvidia", arrays, model)
    for name, array in got.items():
        assert np.array_equal(again[name].view(np.uint8), array.view(np.uint8)), f"{name}: again"

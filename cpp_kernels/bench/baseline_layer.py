"""Baseline arm of ``lowlat bench``: the same plain layer as one kernel an operation, by
cuBLAS and torch where they have one and by plain Triton kernels where not, in a CUDA graph.

Run by a Python that has torch and Triton; knows nothing of lowlat and prints JSON lines as
bench/report.hpp does. Per rank, from the residual R [T, 4, H] (bf16) to the next:

    hyper-connection statistics, combine, norm  ->  [wq_a; wkv], q norm, wq_b, RoPE, stored key
    ->  attention over 128 + 512 keys with a sink  ->  RoPE back, wo_a, wo_b  ->  sum over ranks
    ->  hyper-connection, combine, norm  ->  router, top 6, MXFP4 experts, shared expert
    ->  sum over ranks  ->  hyper-connection

Where it does less than the model asks, in its own favour: fp8 products have one scale a tensor
(cuBLASLt) and static activation scales; stored keys are bf16; with one GPU the sum over ranks adds
four local buffers. Where it does more: wo_a is bf16, as it is in SGLang for V4.1. An expert serves
at most 16 rows.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as error:
    words = f"{error} (--python names an interpreter with torch and Triton)"
    print(json.dumps({"kind": "refusal", "words": words}))
    sys.exit(1)

WINDOW, SELECTED, HEAD_DIM, ROPE_DIM, STREAMS, SLOTS = 128, 512, 512, 64, 4, 6
SINKHORN_PASSES, HC_EPS, SWIGLU_LIMIT, ROUTED_SCALING = 20, 1e-6, 10.0, 1.5
GROUP_WIDTH, O_LORA = 4096, 1024
POOL_ROWS = 2048
FP8 = torch.float8_e4m3fn
CODE_SCALE = 1.0 / 16  # activations of about one: 16 x is well inside e4m3's range


@dataclass(frozen=True)
class Shape:
    """One rank's sizes of a plain layer."""

    hidden: int
    q_lora: int
    experts: int
    intermediate: int
    heads: int
    norm_eps: float
    head_norm: bool  # of q, in V4
    late_pre: bool  # V4.1: a combine takes the weights of the statistics before

    @property
    def groups(self) -> int:
        return self.heads * HEAD_DIM // GROUP_WIDTH


def shape_of(model: str, tp_size: int) -> Shape:
    if model == "v41":
        return Shape(5120, 1280, 384, 2304 // tp_size, 64 // tp_size, 1e-20, False, True)
    return Shape(4096, 1024, 256, 2048 // tp_size, 64 // tp_size, 1e-6, True, False)


# ------------------------------------------------------------------ kernels


@triton.jit
def hc_params_kernel(
    residual, dots, base, scale, out, width, norm_eps, hc_eps, passes: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """out [T, 32]: pre[4], post[4], comb[4][4] of a row, from its 24 dot products."""
    row = tl.program_id(0)
    squares = tl.zeros([block], tl.float32)
    for begin in range(0, width, block):
        i = begin + tl.arange(0, block)
        v = tl.load(residual + row * width + i, i < width, 0.0).to(tl.float32)
        squares += v * v
    rms = tl.rsqrt(tl.sum(squares, 0) / width + norm_eps)
    k = tl.arange(0, 4)
    pre = tl.load(dots + row * 24 + k) * rms * tl.load(scale) + tl.load(base + k)
    post = tl.load(dots + row * 24 + 4 + k) * rms * tl.load(scale + 1) + tl.load(base + 4 + k)
    tl.store(out + row * 32 + k, tl.sigmoid(pre) + hc_eps)
    tl.store(out + row * 32 + 4 + k, 2.0 * tl.sigmoid(post))
    at = 8 + 4 * k[:, None] + k[None, :]
    c = tl.load(dots + row * 24 + at) * rms * tl.load(scale + 2) + tl.load(base + at)
    c = tl.exp(c - tl.max(c, 1)[:, None])
    c = c / tl.sum(c, 1)[:, None] + hc_eps
    c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    for _ in range(passes - 1):
        c = c / (tl.sum(c, 1)[:, None] + hc_eps)
        c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    tl.store(out + row * 32 + at, c)


@triton.jit
def norm_kernel(
    src, stride, mix, gain, out, codes, width, inverse_scale, norm_eps, streams: tl.constexpr,
    has_gain: tl.constexpr, has_codes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """RMS norm of a row, which is the weighted sum of `streams` rows; bf16, and fp8 codes of it."""
    row = tl.program_id(0)
    i = tl.arange(0, block)
    inside = i < width
    if streams == 1:
        v = tl.load(src + row * stride + i, inside, 0.0).to(tl.float32)
    else:
        v = tl.zeros([block], tl.float32)
        for k in range(streams):
            r = tl.load(src + row * stride + k * width + i, inside, 0.0).to(tl.float32)
            v += tl.load(mix + row * 32 + k) * r
        v = v.to(tl.bfloat16).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / width + norm_eps)
    if has_gain:
        v = v * tl.load(gain + i, inside, 0.0).to(tl.float32)
    v = v.to(tl.bfloat16)
    tl.store(out + row * width + i, v, inside)
    if has_codes:
        c = (v.to(tl.float32) * inverse_scale).to(tl.float8e4nv)
        tl.store(codes + row * width + i, c, inside)


@triton.jit
def rope_kernel(x, stride, positions, frequencies, heads, sign):
    """Turns the last 64 of each head's 512, in place; sign -1: back."""
    row, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, 32)
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + pair)
    c, s = tl.cos(angle), sign * tl.sin(angle)
    at = x + row * stride + head * 512 + 448 + 2 * pair
    a, b = tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)
    tl.store(at, (a * c - b * s).to(tl.bfloat16))
    tl.store(at + 1, (a * s + b * c).to(tl.bfloat16))


@triton.jit
def hc_post_kernel(residual, y, mix, out, width, block: tl.constexpr):
    """R'[k] = post[k] y + sum_j comb[j][k] R[j]."""
    row = tl.program_id(0)
    i = tl.program_id(1) * block + tl.arange(0, block)
    inside = i < width
    add = tl.load(y + row * width + i, inside, 0.0).to(tl.float32)
    for k in range(4):
        v = tl.load(mix + row * 32 + 4 + k) * add
        for j in range(4):
            r = tl.load(residual + (row * 4 + j) * width + i, inside, 0.0).to(tl.float32)
            v += tl.load(mix + row * 32 + 8 + 4 * j + k) * r
        tl.store(out + (row * 4 + k) * width + i, v.to(tl.bfloat16), inside)


@triton.jit
def gate_kernel(logits, bias, ids, weights, experts, scaling, block: tl.constexpr):
    """The six best of a row by sqrt(softplus) + bias, and their normed scores."""
    row = tl.program_id(0)
    e = tl.arange(0, block)
    z = tl.load(logits + row * experts + e, e < experts, 0.0).to(tl.float32)
    softplus = tl.where(z > 20.0, z, tl.log(1.0 + tl.exp(z)))
    score = tl.sqrt(softplus)
    rank = tl.where(e < experts, score + tl.load(bias + e, e < experts, 0.0), -1e30)
    slot = tl.arange(0, 8)
    chosen = tl.zeros([8], tl.int32)
    values = tl.zeros([8], tl.float32)
    for k in range(6):
        best = tl.argmax(rank, 0)
        value = tl.sum(tl.where(e == best, score, 0.0), 0)
        chosen = tl.where(slot == k, best, chosen)
        values = tl.where(slot == k, value, values)
        rank = tl.where(e == best, -1e30, rank)
    values = values / tl.sum(values, 0) * scaling
    tl.store(ids + row * 6 + slot, chosen, slot < 6)
    tl.store(weights + row * 6 + slot, values, slot < 6)


@triton.jit
def group_kernel(ids, rows_of, counts, pairs, block: tl.constexpr):
    """Pairs of a row and an expert, by expert: group g is led by pair g, the first that names its
    expert, and has counts[g] pairs, rows_of[g, :]. counts[g] is 0 where pair g leads none."""
    own = tl.program_id(0)
    i = tl.arange(0, block)
    same = tl.load(ids + i, i < pairs, -1) == tl.load(ids + own)
    rank = tl.sum((same & (i < own)).to(tl.int32), 0)
    leader = tl.min(tl.where(same, i, block), 0)
    tl.store(counts + own, tl.where(rank == 0, tl.sum(same.to(tl.int32), 0), 0))
    tl.store(rows_of + leader * 16 + rank, own, rank < 16)


@triton.jit
def expert_product_kernel(
    x, ids, rows_of, counts, codes_a, scales_a, codes_b, scales_b, out, n_half, k_size, out_width,
    per_slot, bn: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    """The rows of one group times their expert's [N, K] fp4 matrix: out[pair, n]. Columns from
    n_half on are of the second matrix (w3 beside w1). per_slot: pairs a row of x."""
    group = tl.program_id(0)
    count = tl.load(counts + group)
    if count == 0:
        return
    first = tl.program_id(1) * bn
    m = tl.arange(0, 16)
    pair = tl.load(rows_of + group * 16 + m, m < count, 0)
    expert = tl.load(ids + tl.load(rows_of + group * 16)).to(tl.int64)
    codes, scales, n0 = codes_a, scales_a, first
    if first >= n_half:
        codes, scales, n0 = codes_b, scales_b, first - n_half
    n = n0 + tl.arange(0, bn)
    kb = tl.arange(0, bk // 2)
    kg = tl.arange(0, bk // 32)
    k = tl.arange(0, bk)
    w_at = codes + expert * n_half * (k_size // 2) + n[None, :] * (k_size // 2) + kb[:, None]
    s_at = scales + expert * n_half * (k_size // 32) + n[:, None] * (k_size // 32) + kg[None, :]
    x_at = x + (pair // per_slot)[:, None] * k_size + k[None, :]
    inside = (m < count)[:, None]
    acc = tl.zeros([16, bn], tl.float32)
    for _ in range(0, k_size, bk):
        rows = tl.load(x_at, inside, 0.0)
        w = tl.load(w_at)
        s = tl.load(s_at)
        acc = tl.dot_scaled(rows, None, "bf16", w, s, "e2m1", acc)
        w_at += bk // 2
        s_at += bk // 32
        x_at += bk
    to = out + pair[:, None] * out_width + (first + tl.arange(0, bn))[None, :]
    tl.store(to, acc.to(tl.bfloat16), inside)


@triton.jit
def swiglu_kernel(
    both, out, codes, width, limit, inverse_scale, has_codes: tl.constexpr, block: tl.constexpr
):
    """silu(min(a, limit)) * clamp(b, -limit, limit) of a row [a | b]."""
    row = tl.program_id(0)
    i = tl.arange(0, block)
    inside = i < width
    a = tl.load(both + row * 2 * width + i, inside, 0.0).to(tl.float32)
    b = tl.load(both + row * 2 * width + width + i, inside, 0.0).to(tl.float32)
    a = tl.minimum(a, limit)
    b = tl.minimum(tl.maximum(b, -limit), limit)
    v = a * tl.sigmoid(a) * b
    tl.store(out + row * width + i, v.to(tl.bfloat16), inside)
    if has_codes:
        tl.store(codes + row * width + i, (v * inverse_scale).to(tl.float8e4nv), inside)


@triton.jit
def rank_sum_kernel(own, others, out, size, ranks: tl.constexpr, block: tl.constexpr):
    """Adds the buffers of `ranks` - 1 others to one's own."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < size
    v = tl.load(own + i, inside, 0.0).to(tl.float32)
    for rank in range(ranks - 1):
        v += tl.load(others + rank * size + i, inside, 0.0).to(tl.float32)
    tl.store(out + i, v.to(tl.bfloat16), inside)


@triton.jit
def expert_sum_kernel(slots, weights, shared, out, width, block: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * block + tl.arange(0, block)
    inside = i < width
    v = tl.load(shared + row * width + i, inside, 0.0).to(tl.float32)
    for k in range(6):
        w = tl.load(weights + row * 6 + k)
        v += w * tl.load(slots + (row * 6 + k) * width + i, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + i, v.to(tl.bfloat16), inside)


# ------------------------------------------------------------------ a layer


class Linear:
    """e4m3 weights [N, K] under one scale."""

    def __init__(self, n: int, k: int, device: str) -> None:
        self.codes = (torch.randn(n, k, device=device) * 32).clamp(-400, 400).to(FP8)
        self.scale = torch.tensor(1.0 / 32 / k**0.5, device=device)
        self.code_scale = torch.tensor(CODE_SCALE, device=device)

    def __call__(self, codes: "torch.Tensor") -> "torch.Tensor":
        """bf16 [T, N] of e4m3 rows [T, K] that stand for 1/16 of a unit each."""
        if codes.device.type == "cpu":
            return (codes.float() @ self.codes.float().T * self.scale * CODE_SCALE).bfloat16()
        return torch._scaled_mm(
            codes, self.codes.T, self.code_scale, self.scale, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    def exact(self, x: "torch.Tensor") -> "torch.Tensor":
        return x.float() @ (self.codes.float() * self.scale).T


class Experts:
    """MXFP4 [E, N, K], as a checkpoint stores it. One tensor's bytes, one scale a group of 32."""

    E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def __init__(self, experts: int, n: int, k: int, device: str) -> None:
        self.codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
        # The codes' root mean square is about 2.7.
        middle = 127 - round(0.5 * torch.log2(torch.tensor(float(k))).item() + 1.5)
        self.scales = torch.randint(
            middle - 1, middle + 2, (experts, n, k // 32), dtype=torch.uint8, device=device
        )

    def exact(self, expert: int) -> "torch.Tensor":
        table = torch.tensor([*self.E2M1, *(-v for v in self.E2M1)], device=self.codes.device)
        codes = self.codes[expert].long()
        values = torch.stack((table[codes & 15], table[codes >> 4]), -1).flatten(1)
        scales = torch.exp2(self.scales[expert].float() - 127)
        return values * scales.repeat_interleave(32, 1)


class Layer:
    def __init__(self, shape: Shape, device: str) -> None:
        s = shape
        self.shape = s
        q_width = s.heads * HEAD_DIM
        self.qkv = Linear(s.q_lora + HEAD_DIM, s.hidden, device)
        self.q_b = Linear(q_width, s.q_lora, device)
        self.wo_a = (
            torch.randn(s.groups, O_LORA, GROUP_WIDTH, device=device) / GROUP_WIDTH**0.5
        ).bfloat16()
        self.wo_b = Linear(s.hidden, s.groups * O_LORA, device)
        self.shared_13 = Linear(2 * s.intermediate, s.hidden, device)
        self.shared_2 = Linear(s.hidden, s.intermediate, device)
        self.w1 = Experts(s.experts, s.intermediate, s.hidden, device)
        self.w3 = Experts(s.experts, s.intermediate, s.hidden, device)
        self.w2 = Experts(s.experts, s.hidden, s.intermediate, device)
        self.gate = (torch.randn(s.experts, s.hidden, device=device) / s.hidden**0.5).bfloat16()
        self.bias = torch.zeros(s.experts, device=device)
        self.fn = torch.randn(2, 24, STREAMS * s.hidden, device=device) / 100
        self.base = torch.randn(2, 24, device=device) / 10
        self.scale = torch.ones(2, 3, device=device)
        self.gain = torch.ones(2, s.hidden, device=device).bfloat16()
        self.q_gain = torch.ones(s.q_lora, device=device).bfloat16()
        self.kv_gain = torch.ones(HEAD_DIM, device=device).bfloat16()
        self.sink = torch.zeros(s.heads, device=device)
        self.pool = torch.randn(POOL_ROWS, HEAD_DIM, device=device).bfloat16()


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of the expert products, chosen by time."""

    n1: int = 64
    k1: int = 128
    warps1: int = 4
    slots1: int = 4
    n2: int = 64
    k2: int = 64
    warps2: int = 4
    slots2: int = 4


class Step:
    """Buffers for T rows, and a layer over them."""

    def __init__(self, shape: Shape, rows: int, device: str, reduce: Callable) -> None:
        self.shape, self.rows, self.reduce, self.blocks = shape, rows, reduce, Blocks()
        s, t = shape, rows

        def bf16(*sizes: int) -> "torch.Tensor":
            return torch.empty(*sizes, dtype=torch.bfloat16, device=device)

        def fp8(*sizes: int) -> "torch.Tensor":
            return torch.empty(*sizes, dtype=FP8, device=device)

        self.mix = torch.full((2, t, 32), 0.25, device=device)
        self.x, self.x_codes = bf16(t, s.hidden), fp8(t, s.hidden)
        self.latent, self.latent_codes = bf16(t, s.q_lora), fp8(t, s.q_lora)
        self.key = bf16(t, HEAD_DIM)
        self.middle = [bf16(t, STREAMS, s.hidden) for _ in range(2)]
        self.ids = torch.zeros(t, SLOTS, dtype=torch.int32, device=device)
        self.weights = torch.zeros(t, SLOTS, device=device)
        self.counts = torch.zeros(t * SLOTS, dtype=torch.int32, device=device)
        self.rows_of = torch.zeros(t * SLOTS, 16, dtype=torch.int32, device=device)
        self.both = bf16(t * SLOTS, 2 * s.intermediate)
        self.act = bf16(t * SLOTS, s.intermediate)
        self.slots = bf16(t * SLOTS, s.hidden)
        self.shared_act = bf16(t, s.intermediate)
        self.shared_codes = fp8(t, s.intermediate)
        self.partial = bf16(t, s.hidden)
        self.positions = torch.arange(4000, 4000 + t, device=device)
        self.frequencies = 160000.0 ** (-torch.arange(32, device=device) / 32.0)
        picked = [torch.randperm(POOL_ROWS, device=device)[: WINDOW + SELECTED] for _ in range(t)]
        self.keys = torch.stack(picked).flatten()
        self.slots_of_rows = torch.arange(t, device=device) * 7 % POOL_ROWS
        # Scores, then the sink's column, which is zero here; the rest of 16 bytes is no key.
        self.scores = torch.zeros(t, s.heads, WINDOW + SELECTED + 8, device=device).bfloat16()
        self.scores[:, :, WINDOW + SELECTED + 1 :] = float("-inf")

    def norm(self, src, stride, gain, out, codes, streams=1, mix=None, rows=None) -> None:
        width = out.shape[-1]
        norm_kernel[(rows or self.rows,)](
            src, stride, src if mix is None else mix, out if gain is None else gain, out,
            out if codes is None else codes, width, 1.0 / CODE_SCALE, self.shape.norm_eps,
            streams=streams, has_gain=gain is not None, has_codes=codes is not None,
            block=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 4,
        )  # fmt: skip

    def statistics(self, layer: Layer, side: int, residual) -> None:
        flat = residual.view(self.rows, -1)
        dots = flat.float() @ layer.fn[side].T
        hc_params_kernel[(self.rows,)](
            flat, dots, layer.base[side], layer.scale[side], self.mix[side], flat.shape[1],
            self.shape.norm_eps, HC_EPS, passes=SINKHORN_PASSES, block=2048, num_warps=8,
        )  # fmt: skip

    def combine(self, layer: Layer, side: int, residual) -> None:
        mix = self.mix[1 - side if self.shape.late_pre else side]
        hidden = self.shape.hidden
        self.norm(residual, STREAMS * hidden, layer.gain[side], self.x, self.x_codes, STREAMS, mix)

    def post(self, side: int, residual, y, out) -> None:
        grid = (self.rows, triton.cdiv(self.shape.hidden, 512))
        hc_post_kernel[grid](residual, y, self.mix[side], out, self.shape.hidden, block=512)

    def attention(self, layer: Layer) -> "torch.Tensor":
        s, t = self.shape, self.rows
        qkv = layer.qkv(self.x_codes)
        width = qkv.shape[1]
        self.norm(qkv, width, layer.q_gain, self.latent, self.latent_codes)
        q = layer.q_b(self.latent_codes)
        if s.head_norm:
            heads = q.view(-1, HEAD_DIM)
            self.norm(heads, HEAD_DIM, None, heads, None, rows=t * s.heads)
        rope_kernel[(t, s.heads)](
            q, q.shape[1], self.positions, self.frequencies, s.heads, 1.0, num_warps=1
        )
        self.norm(qkv[:, s.q_lora :], width, layer.kv_gain, self.key, None)
        rope_kernel[(t, 1)](
            self.key, HEAD_DIM, self.positions, self.frequencies, 1, 1.0, num_warps=1
        )
        layer.pool.index_copy_(0, self.slots_of_rows, self.key)
        keys = layer.pool.index_select(0, self.keys).view(t, WINDOW + SELECTED, HEAD_DIM)
        inner = self.scores[:, :, : WINDOW + SELECTED]
        q3 = q.view(t, s.heads, HEAD_DIM)
        torch.baddbmm(inner, q3, keys.mT, beta=0.0, alpha=HEAD_DIM**-0.5, out=inner)
        shares = torch.softmax(self.scores, -1)
        o = torch.bmm(shares[:, :, : WINDOW + SELECTED], keys).view(t, -1)
        rope_kernel[(t, s.heads)](
            o, o.shape[1], self.positions, self.frequencies, s.heads, -1.0, num_warps=1
        )
        u = torch.bmm(o.view(t, s.groups, GROUP_WIDTH).transpose(0, 1), layer.wo_a.transpose(1, 2))
        codes = (u.transpose(0, 1).reshape(t, -1) * (1.0 / CODE_SCALE)).to(FP8)
        return layer.wo_b(codes)

    def experts(self, layer: Layer) -> "torch.Tensor":
        s, t, b = self.shape, self.rows, self.blocks
        logits = self.x @ layer.gate.T
        gate_kernel[(t,)](
            logits, layer.bias, self.ids, self.weights, s.experts, ROUTED_SCALING,
            block=triton.next_power_of_2(s.experts),
        )  # fmt: skip
        group_kernel[(t * SLOTS,)](
            self.ids, self.rows_of, self.counts, t * SLOTS,
            block=triton.next_power_of_2(t * SLOTS), num_warps=1,
        )  # fmt: skip
        grouped = (self.ids, self.rows_of, self.counts)
        expert_product_kernel[(t * SLOTS, 2 * s.intermediate // b.n1)](
            self.x, *grouped, layer.w1.codes, layer.w1.scales, layer.w3.codes, layer.w3.scales,
            self.both, s.intermediate, s.hidden, 2 * s.intermediate, SLOTS,
            bn=b.n1, bk=b.k1, num_warps=b.warps1, num_stages=b.slots1,
        )  # fmt: skip
        block = triton.next_power_of_2(s.intermediate)
        swiglu_kernel[(t * SLOTS,)](
            self.both, self.act, self.act, s.intermediate, SWIGLU_LIMIT, 0.0, has_codes=False,
            block=block,
        )  # fmt: skip
        expert_product_kernel[(t * SLOTS, s.hidden // b.n2)](
            self.act, *grouped, layer.w2.codes, layer.w2.scales, layer.w2.codes, layer.w2.scales,
            self.slots, s.hidden, s.intermediate, s.hidden, 1,
            bn=b.n2, bk=b.k2, num_warps=b.warps2, num_stages=b.slots2,
        )  # fmt: skip
        both = layer.shared_13(self.x_codes)
        swiglu_kernel[(t,)](
            both, self.shared_act, self.shared_codes, s.intermediate, SWIGLU_LIMIT,
            1.0 / CODE_SCALE, has_codes=True, block=block,
        )  # fmt: skip
        shared = layer.shared_2(self.shared_codes)
        expert_sum_kernel[(t, triton.cdiv(s.hidden, 512))](
            self.slots, self.weights, shared, self.partial, s.hidden, block=512
        )
        return self.partial

    def layer(self, layer: Layer, residual, out) -> None:
        """out = the residual after the layer; all of them [T, 4, H]."""
        self.half(layer, 0, residual, self.middle[0])
        self.half(layer, 1, self.middle[0], out)

    def half(self, layer: Layer, side: int, residual, out) -> None:
        """One sublayer: 0 attention, 1 experts, from its residual to the next."""
        if self.shape.late_pre:
            self.combine(layer, side, residual)
            self.statistics(layer, side, residual)
        else:
            self.statistics(layer, side, residual)
            self.combine(layer, side, residual)
        y = self.attention(layer) if side == 0 else self.experts(layer)
        self.post(side, residual, self.reduce(y), out)


# ------------------------------------------------------------------ the same in fp32, to compare


def coded(x: "torch.Tensor") -> "torch.Tensor":
    """What the static activation codes make of a value."""
    return (x.bfloat16().float() / CODE_SCALE).to(FP8).float() * CODE_SCALE


def rms(x: "torch.Tensor", eps: float) -> "torch.Tensor":
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def swiglu(a: "torch.Tensor", b: "torch.Tensor") -> "torch.Tensor":
    b = b.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return torch.nn.functional.silu(a.clamp(max=SWIGLU_LIMIT)) * b


def turned(x: "torch.Tensor", step: Step, sign: float) -> "torch.Tensor":
    """x [T, heads, 512] with its last 64 turned by the rows' positions."""
    angle = step.positions[:, None, None].float() * step.frequencies
    pairs = torch.view_as_complex(x[..., 448:].reshape(*x.shape[:-1], 32, 2).contiguous())
    pairs = pairs * torch.polar(torch.ones_like(angle), sign * angle)
    return torch.cat((x[..., :448], torch.view_as_real(pairs).flatten(-2)), -1)


def exact_mix(shape: Shape, layer: Layer, side: int, residual: "torch.Tensor") -> tuple:
    flat = residual.float().flatten(1)
    m = rms(flat, shape.norm_eps) @ layer.fn[side].T * layer.scale[side, 0] + layer.base[side]
    c = torch.softmax(m[:, 8:].view(-1, 4, 4), -1) + HC_EPS
    c = c / (c.sum(1, keepdim=True) + HC_EPS)
    for _ in range(SINKHORN_PASSES - 1):
        c = c / (c.sum(2, keepdim=True) + HC_EPS)
        c = c / (c.sum(1, keepdim=True) + HC_EPS)
    return torch.sigmoid(m[:, :4]) + HC_EPS, 2 * torch.sigmoid(m[:, 4:8]), c


def exact_attention(step: Step, layer: Layer, x: "torch.Tensor") -> "torch.Tensor":
    s, t = step.shape, step.rows
    qkv = layer.qkv.exact(coded(x))
    q = layer.q_b.exact(coded(rms(qkv[:, : s.q_lora], s.norm_eps))).view(t, s.heads, HEAD_DIM)
    q = turned(rms(q, s.norm_eps) if s.head_norm else q, step, 1.0)
    key = turned(rms(qkv[:, s.q_lora :], s.norm_eps).view(t, 1, HEAD_DIM), step, 1.0)
    pool = layer.pool.float()
    pool[step.slots_of_rows] = key.view(t, HEAD_DIM)
    keys = pool[step.keys].view(t, -1, HEAD_DIM)
    scores = torch.einsum("thd,tkd->thk", q, keys) * HEAD_DIM**-0.5
    sink = torch.zeros(t, s.heads, 1, device=x.device)
    o = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1] @ keys
    o = turned(o, step, -1.0).reshape(t, s.groups, GROUP_WIDTH)
    u = torch.einsum("tgk,gnk->tgn", o, layer.wo_a.float()).flatten(1)
    return layer.wo_b.exact(coded(u))


def exact_experts(step: Step, layer: Layer, x: "torch.Tensor") -> "torch.Tensor":
    """With the rows' chosen experts as the step has them: which they are is compared apart."""
    s = step.shape
    y = torch.zeros(step.rows, s.hidden, device=x.device)
    for row in range(step.rows):
        for slot in range(SLOTS):
            expert = int(step.ids[row, slot])
            a, b = layer.w1.exact(expert) @ x[row], layer.w3.exact(expert) @ x[row]
            y[row] += step.weights[row, slot] * (layer.w2.exact(expert) @ swiglu(a, b))
    both = layer.shared_13.exact(coded(x))
    half = s.intermediate
    return y + layer.shared_2.exact(coded(swiglu(both[:, :half], both[:, half:])))


def check(step: Step, layer: Layer, others: "torch.Tensor | None") -> dict[str, float]:
    """rel_l2 of each half and of the layer's residual against fp32; raises where one is off."""
    s, t = step.shape, step.rows
    device = layer.gate.device
    residual = torch.randn(t, STREAMS, s.hidden, device=device).bfloat16()
    out = torch.empty_like(residual)
    step.mix.fill_(0.25)
    step.layer(layer, residual, out)
    extra = 0.0 if others is None else others.float().sum(0)

    def combined(side: int, r: "torch.Tensor", pre: "torch.Tensor") -> "torch.Tensor":
        x = torch.einsum("tk,tkh->th", pre, r.float())
        return rms(x, s.norm_eps).bfloat16().float()

    def mixed(r: "torch.Tensor", y: "torch.Tensor", mix: tuple) -> "torch.Tensor":
        add = mix[1][:, :, None] * y.bfloat16().float()[:, None]
        return (add + torch.einsum("tjk,tjh->tkh", mix[2], r.float())).bfloat16()

    first = exact_mix(s, layer, 0, residual)
    pre = torch.full_like(first[0], 0.25) if s.late_pre else first[0]
    y_attention = exact_attention(step, layer, combined(0, residual, pre))
    middle = mixed(residual, y_attention + extra, first)
    second = exact_mix(s, layer, 1, middle)
    x = combined(1, middle, first[0] if s.late_pre else second[0])
    y_experts = exact_experts(step, layer, x)
    scores = torch.sqrt(torch.nn.functional.softplus(x @ layer.gate.float().T))
    best = scores.gather(1, step.ids.long()).sort(-1).values / scores.topk(SLOTS).values.flip(-1)
    want = {"middle": (step.middle[0], middle), "experts": (step.partial, y_experts)}
    want["layer"] = (out, mixed(middle, y_experts + extra, second))
    errors = {
        name: float((got.float() - exact.float()).norm() / exact.float().norm())
        for name, (got, exact) in want.items()
    }
    if int(step.counts.max()) > 16:
        raise ValueError("an expert was chosen by more than 16 rows, which the baseline has not")
    errors["router"] = float((1 - best).abs().max())
    for name, error in errors.items():
        if not error <= 5e-2:
            raise ValueError(f"{name} of the baseline is off by {error:.3g} (rel_l2); bound 5e-2")
    return errors


# ------------------------------------------------------------------ the draft's proposals

VOCAB, PROPOSALS, MARKOV_RANK = 129280, 5, 256


class Draft:
    """Five proposals of `batch` requests, each the best of base + w1[token] w2^T over the whole
    vocabulary. With one GPU and several ranks the rank's own best stands for that of all, and a
    rank that could send its best to the others sends it to none."""

    def __init__(self, batch: int, tp_size: int, rank: int, ranks: int, device: str) -> None:
        self.batch, self.ranks, self.shard = batch, ranks, VOCAB // tp_size
        self.begin = self.shard * rank
        sets = 6
        self.w1 = torch.randn(VOCAB, MARKOV_RANK, device=device).bfloat16()
        self.w2 = torch.randn(sets, self.shard, MARKOV_RANK, device=device).bfloat16()
        self.base = torch.randn(sets, PROPOSALS, batch, self.shard, device=device)
        self.anchors = torch.arange(batch, device=device) * 7919 % VOCAB
        self.tokens = torch.zeros(batch, PROPOSALS, dtype=torch.int64, device=device)
        self.best = torch.zeros(ranks, batch, 2, device=device)

    def propose(self, chosen: int) -> None:
        token = self.anchors
        for step in range(PROPOSALS):
            bias = self.w1.index_select(0, token) @ self.w2[chosen].T
            value, place = torch.max(self.base[chosen, step] + bias, -1)
            token = place + self.begin
            if self.ranks > 1:
                own = torch.stack((value, token.float()), -1)
                torch.distributed.all_gather_into_tensor(self.best, own[None])
                first = self.best[:, :, 0].argmax(0)
                token = self.best[:, :, 1].gather(0, first[None])[0].long()
            self.tokens[:, step] = token

    def launch(self) -> None:
        for chosen in range(len(self.w2)):
            self.propose(chosen)


# ------------------------------------------------------------------ time


@dataclass(frozen=True)
class Times:
    median: float
    low: float  # the 10th and the 90th of a hundred
    high: float


def graph_of(body: Callable[[], None]) -> "torch.cuda.CUDAGraph":
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process (NCCL's) may go on meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph


def time_of(body: Callable[[], None], repeats: int, units: int) -> Times:
    """Microseconds of a captured body over its units."""
    graph = graph_of(body)
    times = []
    # Between ranks several replays in a row, so that their starts do not count.
    in_a_row = 4 if torch.distributed.is_initialized() else 1
    for i in range(repeats + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if in_a_row > 1:
            graph.replay()
        begin.record()
        for _ in range(in_a_row):
            graph.replay()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(begin.elapsed_time(end) * 1e3 / units / in_a_row)
    times.sort()
    return Times(times[len(times) // 2], times[len(times) // 10], times[len(times) * 9 // 10])


def choose_blocks(step: Step, layers: list[Layer]) -> None:
    """The fastest tiles of the two expert products, by this step's rows."""

    def fastest(candidates: list[Blocks]) -> Blocks:
        def us(blocks: Blocks) -> float:
            step.blocks = blocks
            body = lambda: [step.experts(layer) for layer in layers]  # noqa: E731
            return time_of(body, 7, len(layers)).median

        return min(candidates, key=us)

    tiles = ((64, 256, 4, 3), (64, 128, 4, 5), (32, 256, 4, 4), (64, 256, 4, 4), (64, 128, 8, 5))
    step.blocks = fastest([Blocks(*tile) for tile in tiles])
    first = (step.blocks.n1, step.blocks.k1, step.blocks.warps1, step.blocks.slots1)
    tiles = ((64, 64, 4, 5), (128, 64, 4, 5), (32, 64, 4, 5), (128, 64, 8, 5))
    step.blocks = fastest([Blocks(*first, *tile) for tile in tiles])


def run_rank(rank: int, ranks: int, options: argparse.Namespace) -> None:
    shape = shape_of(options.model, options.tp)
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    if ranks > 1:
        # No multicast memory: not every host has it, and none must for this arm.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{options.meeting}", rank=rank, world_size=ranks
        )
    if options.what == "draft":
        for rows in options.rows:
            draft = Draft(rows // (PROPOSALS + 1), options.tp, rank, ranks, device)
            times = time_of(draft.launch, options.repeats, len(draft.w2))
            if rank == 0:
                print_figure("draft", rows, times, options, {}, "")
        leave(ranks)
        return
    layers = [Layer(shape, device) for _ in range(options.layers)]
    for rows in options.rows:
        others = None
        if ranks == 1 and options.tp > 1:
            others = torch.randn(options.tp - 1, rows, shape.hidden, device=device).bfloat16() / 4
        summed = torch.empty(rows, shape.hidden, dtype=torch.bfloat16, device=device)

        def reduce(partial, others=others, summed=summed):
            if ranks > 1:
                torch.distributed.all_reduce(partial)
                return partial
            if others is None:
                return partial
            rank_sum_kernel[(triton.cdiv(partial.numel(), 1024),)](
                partial, others, summed, partial.numel(), ranks=options.tp, block=1024
            )
            return summed

        step = Step(shape, rows, device, reduce)
        errors = check(step, layers[0], others) if ranks == 1 else {}
        residuals = [torch.randn(rows, STREAMS, shape.hidden, device=device).bfloat16()]
        residuals.append(torch.empty_like(residuals[0]))
        step.combine(layers[0], 1, residuals[0])
        if ranks == 1:
            choose_blocks(step, layers)

        def chain(step=step, residuals=residuals):
            for i, layer in enumerate(layers):
                step.layer(layer, residuals[i % 2], residuals[1 - i % 2])

        def half(side: int, step=step, residuals=residuals):
            for layer in layers:
                step.half(layer, side, residuals[0], residuals[1])

        def exchange(step=step, residuals=residuals):
            for layer in layers:
                step.post(0, residuals[0], step.reduce(step.partial), step.middle[0])
                step.combine(layer, 1, step.middle[0])

        parts = {"exchange": exchange}
        if options.what == "layer":
            parts = {
                "layer": chain,
                "attention": lambda half=half: half(0),
                "moe": lambda half=half: half(1),
            }
        for name, body in parts.items():
            times = time_of(body, options.repeats, len(layers))
            if rank == 0:
                print_figure(name, rows, times, options, errors, str(step.blocks))
    leave(ranks)


def print_figure(
    name: str, rows: int, times: Times, options: argparse.Namespace, errors: dict, tiles: str
) -> None:
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    figure = {
        "kind": "figure", "arm": "baseline", "name": name, "model": options.model,
        "tp": options.tp, "gpus": options.gpus, "rows": rows, "unit": "us",
        **{f.name: getattr(times, f.name) for f in fields(times)},
        "repeats": options.repeats, "errors": errors, "words": f"{versions} {tiles}".strip(),
    }  # fmt: skip
    print(json.dumps(figure), flush=True)


def leave(ranks: int) -> None:
    """Ends a rank's process. The graphs still hold the group; taking it apart would wait."""
    if ranks > 1:
        torch.cuda.synchronize()
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("v41", "v4"), default="v41")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4, 8), default=4)
    parser.add_argument("--rows", type=lambda v: [int(n) for n in v.split(",")], default=[6])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--what", choices=("layer", "exchange", "draft"), default="layer")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--meeting", default="", help="file where several ranks meet")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.device_count() < options.gpus:
        seen = torch.cuda.device_count()
        words = f"torch sees {seen} GPUs; {options.gpus} needed"
        print(json.dumps({"kind": "refusal", "words": words}))
        return 1
    if options.gpus == 1:
        run_rank(0, 1, options)
        return 0
    import tempfile

    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        options.meeting = f"{folder}/meeting"
        processes.spawn(run_rank, (options.gpus, options), nprocs=options.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Random weights for a model that has none: a value is a hash of its tensor's name and of its place
there, so that every process and device makes the same ones, and any part of a tensor by itself.
"""

import os
import zlib
from functools import cache
from statistics import NormalDist
from typing import Any

import torch

UE8M0_OF_ONE = 127
# A row of 5120 values of fp4, whose mean square is 8.6.
FP4_SCALE = UE8M0_OF_ONE - 8
FP8_SCALE = 2.0**-6
HASH_EXPERTS = 256  # that a hash layer's table names
PIECE = 1 << 26  # values that temporaries are made for at once
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Where tokens follow one another: how an embedding's values lie, and what a draft says for the next
# token more than its rows do.
CHAINED_EMBEDDING = 0.5
CHAINED_DRAFT = 100.0


def fill(name: str, tensor: Any, first: int = 0) -> None:
    """Fills the tensor of that name, contiguous, such that products have about the size of their
    inputs. `first`: it is a part of the whole, whole rows that begin at that place.

    LOWLAT_TEST_BIAS is the spread of the biases that choose experts; 0 leaves it to the scores.
    With LOWLAT_TEST_CHAIN above 0 the head expects behind a token the next one of the vocabulary,
    by up to so much, for each token another part of it, and the draft proposes it: so drafts are
    accepted, and few tokens lie close to others. Of whole tensors only."""
    last = name.rsplit(".", 1)[-1]
    chain = float(os.environ.get("LOWLAT_TEST_CHAIN", "0"))
    if chain and name in CHAINED:
        CHAINED[name](name, tensor, chain)
        return
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor.view(torch.uint8).fill_(FP4_SCALE)
    elif last.endswith("scale_inv"):
        tensor.fill_(FP8_SCALE)
    elif tensor.dtype == torch.float8_e4m3fn:
        choose(name, tensor.view(torch.uint8), normal(1.0, tensor.dtype).view(torch.uint8), first)
    elif tensor.dtype in (torch.int8, torch.uint8):
        write_bytes(name, tensor, first)
    elif name.endswith("self_attn.wo_a.weight"):
        # Expanded from fp8 blocks, in a checkpoint.
        exact = normal(1.0, torch.float8_e4m3fn).to(tensor.dtype) * FP8_SCALE
        choose(name, tensor, exact, first)
    elif last == "tid2eid":
        choose(name, tensor, torch.arange(HASH_EXPERTS, dtype=tensor.dtype), first)
    elif not tensor.is_floating_point():
        return
    elif "norm" in name and tensor.ndim == 1:
        tensor.fill_(1.0)
    elif last == "e_score_correction_bias":
        spread = float(os.environ.get("LOWLAT_TEST_BIAS", "0"))
        choose(name, tensor, normal(spread, tensor.dtype), first)
    elif "hc_" in last and tensor.ndim == 1:
        choose(name, tensor, normal(0.1, tensor.dtype), first)
    elif tensor.ndim >= 2:
        choose(name, tensor, normal(tensor.shape[-1] ** -0.5, tensor.dtype), first)
    else:
        tensor.zero_()


def chained_embedding(name: str, tensor: Any, chain: float) -> None:
    choose(name, tensor, normal(CHAINED_EMBEDDING, tensor.dtype), 0)


def chained_head(name: str, tensor: Any, chain: float) -> None:
    before = tensor.new_empty(tensor.shape)
    spread = normal(tensor.shape[-1] ** -0.5, tensor.dtype)
    choose(name, tensor, spread, 0)
    choose(EMBEDDING, before, spread, 0)
    parts = tensor.new_empty(tensor.shape[0], 1)
    even = torch.linspace(0, chain, 1 << 16, dtype=torch.float32)
    choose("chain", parts, even.to(tensor.dtype), 0)
    tensor.add_(before.roll(1, 0).mul_(parts))


def chained_draft(name: str, tensor: Any, chain: float) -> None:
    spread = normal(tensor.shape[-1] ** -0.5, tensor.dtype)
    choose("markov_head.markov_w1.weight", tensor, spread, 0)
    tensor.copy_(tensor.roll(1, 0).mul_(CHAINED_DRAFT))


CHAINED = {
    EMBEDDING: chained_embedding,
    HEAD: chained_head,
    "markov_head.markov_w2.weight": chained_draft,
}


def normal(spread: float, dtype: Any) -> Any:
    """65536 values that lie as those of a normal distribution do, made on the CPU wherever they
    are used: devices round exp and log in ways of their own."""
    return (spread * quantiles()).to(dtype)


@cache
def quantiles() -> Any:
    of_one, count = NormalDist(), 1 << 16
    values = [of_one.inv_cdf((i + 0.5) / count) for i in range(count)]
    # A model is loaded with a default dtype of its own.
    return torch.tensor(values, dtype=torch.float32)


def choose(name: str, tensor: Any, values: Any, first: int) -> None:
    """Each value of the tensor by its hash, of a power of two of values."""
    flat, values = tensor.view(-1), values.to(tensor.device)
    for start in range(0, flat.numel(), PIECE):
        part = flat[start : start + PIECE]
        places = (words(name, first + start, part.numel(), part.device) >> 8) & (len(values) - 1)
        torch.index_select(values, 0, places, out=part)


def write_bytes(name: str, tensor: Any, first: int) -> None:
    """Four to a hash."""
    flat = tensor.view(-1).view(torch.int32)
    for start in range(0, flat.numel(), PIECE):
        part = flat[start : start + PIECE]
        part.copy_(words(name, first // 4 + start, part.numel(), part.device))


def words(name: str, first: int, count: int, device: Any) -> Any:
    """int32 [count], the hashes of places from `first`."""
    x = torch.arange(first, first + count, dtype=torch.int32, device=device)
    x = x.mul_(signed(0x9E3779B1)).bitwise_xor_(signed(zlib.crc32(name.encode())))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        # Shifted in are zeros, not the sign.
        x = x.bitwise_xor_((x >> shift) & ((1 << (32 - shift)) - 1)).mul_(signed(factor))
    return x


def signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word

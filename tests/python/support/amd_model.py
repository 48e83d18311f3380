"""A model of the platform amd whose devices are ranks of a machine of tests/tools/amd, and steps of
it beside the same steps on another platform."""

import ctypes as ct
import json

import numpy as np
from lowlat import _dispatch, _kernels

from support import kernels_abi as abi
from support import small_model
from support.amd_machine import hip, machine

# A layer with all that one can have: an n-gram table, compressed keys, a selection and candidates.
TINY_V41 = small_model.small_model(
    small_model.V41_SIZES,
    [small_model.layer(1, 0, 0, engram=0)],
    lengths=small_model.EVEN,
    candidate_layer=-1,
    larger={"ffn.experts.w": -1, "wo_b": 1, "engram.embed": 3},
    entry_size=1.5,
    num_draft_stages=1,
)
TINY_V4 = small_model.small_model(
    small_model.V4_SIZES,
    small_model.v4_layers([4], 0),
    lengths=small_model.OVERLAP,
    larger={"wo_b": 1},
    entry_size=1.0,
    num_draft_stages=1,
)
WAIT_BUDGET_S = 600  # of the host, for one launch
# What the order of a product's sums does to a layer beside scalar's (docs/numerics.md): fp32 values
# that are not rounded, relative to the largest; of rounded ones, and of a cache's bytes, how many
# differ at all, and two of few; how many places of bf16 an output is off.
NEAR, DIFFERING, SOME, PLACES = 1e-6, 1e-3, 2, 4
# In the order of lowlat_dtype.
DTYPES = ("u8", "i32", "i64", "f32", "bf16", "e4m3", "ue8m0", "fp4x2")


def check_near(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """A cache of a layer beside scalar's: what it holds in fp32 is near, of other bytes that hold
    something few differ."""
    assert want.any(), name
    if want.dtype == np.float32:
        assert np.abs(got - want).max() <= NEAR * np.abs(want).max(), name
    else:
        got, want = got.view(np.uint8), want.view(np.uint8)
        differing, held = (got != want).sum(), (want != 0).sum()
        assert differing <= max(SOME, DIFFERING * held), (name, differing, held)


def check_logits_near(got: np.ndarray, want: np.ndarray) -> None:
    """Logits are bf16 values."""
    assert np.isfinite(want).all()
    check_places("logits", got.view(np.uint32) >> 16, want.view(np.uint32) >> 16)


def check_places(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Codes of bf16: few differ, and by few places."""
    apart = np.abs(got.astype(np.int64) - want.astype(np.int64))
    assert (apart > 0).sum() <= max(SOME, DIFFERING * apart.size), (name, (apart > 0).sum())
    assert apart.max() <= PLACES, (name, apart.max())


def device_memory(runtime: hip.Runtime, rank: int = 0):
    """place(array): a copy in the memory of a rank's device, seen as an array."""

    def place(array):
        address = runtime.machine.allocate(max(array.nbytes, 1), "tensor", owner=rank)
        raw = (ct.c_uint8 * array.nbytes).from_address(address)
        out = np.frombuffer(raw, array.dtype).reshape(array.shape)
        out[...] = array
        return out

    return place


class AmdGroup(abi.Group):
    platform = b"amd"

    def __init__(self, runtime: hip.Runtime, path, weights: small_model.Weights) -> None:
        self.runtime = runtime
        super().__init__(path, weights.small.config, weights.tp_size, weights.shard)

    def place(self, array, rank):
        """A copy in the device's memory, seen as an array."""
        return device_memory(self.runtime, rank)(array)

    def launch(self, function, structs):
        for model, struct in zip(self.models, structs, strict=True):
            self.must(function(model, ct.byref(struct), None))
        for model in self.models:
            budget = ct.c_uint64(WAIT_BUDGET_S * 1_000_000_000)
            status = self.lib.lowlat_synchronize(model, budget)
            if self.runtime.failure:
                raise machine.MachineError(self.runtime.failure)
            self.must(status)


class Steps:
    """Two requests, page by page in order, on any group."""

    def __init__(self, group: abi.Group, config: dict, seed: int) -> None:
        self.group, self.config = group, config
        rng = np.random.default_rng(seed)
        num_words = config["image_token"] if config["image_token"] >= 0 else config["vocab"] - 2
        self.text = rng.integers(3, num_words, (2, 64)).astype(np.int32)
        self.pages = np.arange(config["num_pages"], dtype=np.int32).reshape(2, -1)
        self.done = [0, 0]
        self.pending = None

    def step(self, mode: int, counts) -> list[np.ndarray]:
        """Rows of each request. Gives every rank's logits of all rows."""
        size = self.config["page_size"]
        tokens, pos, slots, history = [], [], [], np.zeros((2, 3), np.int32)
        for idx, count in enumerate(counts):
            at = self.done[idx] + np.arange(count)
            tokens.append(self.text[idx, at])
            pos.append(at.astype(np.int32))
            slots.append((self.pages[idx, at // size] * size + at % size).astype(np.int32))
            before = self.text[idx, max(0, self.done[idx] - 3) : self.done[idx]]
            history[idx, 3 - len(before) :] = before
            self.done[idx] += count
        rows = sum(counts)
        outs, structs = [], []
        for rank in range(len(self.group.models)):

            def placed(array, rank=rank):
                return self.group.place(np.ascontiguousarray(array), rank)

            logits = placed(np.full((rows, self.config["vocab"]), np.nan, np.float32))
            outs.append(logits)
            structs.append(
                abi.Step(
                    mode=mode,
                    num_rows=rows,
                    batch_size=2,
                    tokens_per_request=0 if mode == abi.EXTEND else counts[0],
                    page_table_stride=self.pages.shape[1],
                    token_ids=placed(np.concatenate(tokens)),
                    positions=placed(np.concatenate(pos)),
                    request_idx=placed(np.repeat(np.arange(2, dtype=np.int32), counts)),
                    slots=placed(np.concatenate(slots)),
                    page_table=placed(self.pages),
                    history=placed(history),
                    state_slots=placed(np.array([1, 0], np.int32)),
                    num_logit_rows=rows,
                    logit_rows=placed(np.arange(rows, dtype=np.int32)),
                    logits=logits,
                    argmax=placed(np.full(rows, -1, np.int32)),
                )
            )
        lib = self.group.lib
        launch = lib.lowlat_plain_step_launch if mode == abi.EXTEND else lib.lowlat_step_launch
        self.group.launch(launch, structs)
        self.pending = (np.concatenate(slots), np.concatenate(pos))
        return [out.copy() for out in outs]

    def draft(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Injects the last step's rows and proposes: every rank's tokens and logits."""
        block, vocab, size = (
            self.config["draft_block"],
            self.config["vocab"],
            self.config["page_size"],
        )
        slots = []
        for idx in range(2):
            at = self.done[idx] + np.arange(block)
            slots.append((self.pages[idx, at // size] * size + at % size).astype(np.int32))
        outs, structs = [], []
        for rank in range(len(self.group.models)):

            def placed(array, rank=rank):
                return self.group.place(np.ascontiguousarray(array), rank)

            tokens = placed(np.full((2, block), -1, np.int32))
            logits = placed(np.full((2, block, vocab), np.nan, np.float32))
            outs.append((tokens, logits))
            anchors = np.array([self.text[i, self.done[i]] for i in range(2)], np.int32)
            structs.append(
                abi.Draft(
                    num_inject_rows=len(self.pending[0]),
                    inject_slots=placed(self.pending[0]),
                    inject_positions=placed(self.pending[1]),
                    batch_size=2,
                    page_table_stride=self.pages.shape[1],
                    anchors=placed(anchors),
                    prefixes=placed(np.array(self.done, np.int32)),
                    slots=placed(np.stack(slots)),
                    page_table=placed(self.pages),
                    temperature=placed(np.array([0.0, 0.8], np.float32)),
                    noise_row=placed(np.array([1, 0], np.int32)),
                    noise_offset=placed(np.array([3, 9], np.int64)),
                    noise_key=17,
                    draft_tokens=tokens,
                    draft_logits=logits,
                )
            )
        self.group.launch(self.group.lib.lowlat_draft_launch, structs)
        return [tuple(one.copy() for one in out) for out in outs]


class Hosted:
    """A model of one rank inside an engine that keeps its caches: weights, caches and arrays where
    `place` puts a numpy array. V4.1's index keys are two tensors, as SGLang has them on AMD."""

    def __init__(self, platform: str, small: small_model.SmallModel, seed: int, place) -> None:
        config = self.config = small.config
        self.place = place
        self.is_v41 = config["kind"] == small_model.V41_KIND
        absent = dict(num_engrams=0, engram_head_dim=0, engram_pad_token=0, engram_primes=[])
        absent |= dict(engram_multipliers=[], candidate_blocks=0, candidate_block_size=0)
        names = set(json.loads(_dispatch.kernel_config(_dispatch.built_in("tiny-v41"))))
        steps = dict(tp_rank=0, tp_size=1, widths=[12], max_batch=2, max_rows=64)
        steps |= {name: config[name] for name in ("page_size", "num_pages", "wait_budget_ns")}
        fields = {name: config.get(name, absent.get(name)) for name in names} | steps
        hosting = dict(expert_layout="row_major", bf16_wo_a=0, proposals=0, stages=0)
        self.model = _kernels.HostedModel(platform, fields, hosting)
        weights = small_model.Weights(small, seed, 1)
        self.held = []
        for spec in self.model.tensors():
            if not spec["pool"]:
                array = weights.shard(Spec(spec), 0)
                self.model.bind(spec["name"], self.given(array, spec["dtype"]))
        self.model.ready()
        self.bind_pools()

    def close(self) -> None:
        """While the runtime is there that its memory is of."""
        del self.model

    def given(self, array: np.ndarray, dtype: str) -> tuple[int, list[int], str]:
        """A tensor as HostedModel takes it."""
        placed = self.placed(array)
        return placed.ctypes.data, list(array.shape), dtype

    def placed(self, array: np.ndarray) -> np.ndarray:
        self.held.append(self.place(np.ascontiguousarray(array)))
        return self.held[-1]

    def bind_pools(self) -> None:
        """Two window pages more than full ones, whose page 0 is padding's; requests 1 and 2."""
        config, size = self.config, self.config["page_size"]
        self.pages = config["num_pages"] + 1
        windows = self.pages + 2
        self.pools, given = {}, []

        def give(name, rows, columns, dtype):
            kind = np.float32 if dtype == "f32" else np.uint8
            self.pools[name] = self.placed(np.zeros((rows, columns), kind))
            given.append((name, (self.pools[name].ctypes.data, [rows, columns], dtype)))

        for spec in self.model.tensors():
            if not spec["pool"]:
                continue
            kind, _, layer = spec["name"].rpartition(".")
            rows = {"kv.swa": windows, "kv.extra": self.pages}.get(kind, windows * 16 * size)
            if kind == "kv.index" and self.is_v41:
                give(spec["name"], self.pages * size, 4096, "u8")
                give(f"kv.index_scales.{layer}", self.pages * size, 256, "u8")
            else:
                give(spec["name"], rows, spec["shape"][1], spec["dtype"])
        slots = np.arange(self.pages * size, dtype=np.int64)
        self.slots = self.placed((slots // size + 2) * size + slots % size)
        self.history = self.placed(np.full((3, 3), 5, np.int32))
        self.model.bind_pools(
            num_pages=self.pages,
            num_window_pages=windows,
            num_requests=3,
            window_slots=self.slots.ctypes.data,
            history=self.history.ctypes.data if self.is_v41 else 0,
            split_index=self.is_v41,
            pools=given,
        )

    def step(self, first: int, seed: int) -> dict[str, np.ndarray]:
        """A verify step of two requests of 6 rows from position `first` on; what it gives."""
        config, size, rows = self.config, self.config["page_size"], 12
        rng = np.random.default_rng(seed)
        per = config["num_pages"] // 2
        table = 1 + np.arange(2 * per, dtype=np.int32).reshape(2, per)
        positions = np.tile(first + np.arange(6), 2)
        pages = table[np.repeat(np.arange(2), 6), positions // size]
        arrays = {
            "token_ids": rng.integers(3, 90, rows),
            "positions": positions,
            "slots": pages.astype(np.int64) * size + positions % size,
            "requests": np.array([1, 2]),
        }
        arrays = {name: self.placed(array.astype(np.int64)) for name, array in arrays.items()}
        widths = {"hidden": 1, "features": config["num_draft_stages"], "streams": 4}
        out = {
            name: self.placed(np.full((rows, width * config["hidden"]), 0xABCD, np.uint16))
            for name, width in widths.items()
        }
        self.out = out
        placed_table = self.placed(table)
        self.model.step(
            mode="target_verify",
            batch_size=2,
            tokens_per_request=6,
            page_table_stride=per,
            num_table_pages=per,
            page_table=placed_table.ctypes.data,
            stream=0,
            **{name: array.ctypes.data for name, array in {**arrays, **out}.items()},
        )
        self.model.synchronize(WAIT_BUDGET_S * 1_000_000_000)
        return {name: array.copy() for name, array in out.items()}


class Spec:
    """A tensor of ``HostedModel.tensors()`` as ``Weights.shard`` reads one."""

    def __init__(self, spec: dict) -> None:
        self.name = spec["name"].encode()
        self.shape, self.ndim = spec["shape"], len(spec["shape"])
        self.shard_dim = spec["shard_dim"]
        self.dtype = DTYPES.index(spec["dtype"])


class StatusWords(abi.Struct):
    _fields_ = (
        *abi.same_type("struct_bytes state kernel stage", abi.u32),
        ("peer", abi.i32),
        ("reserved", abi.u32),
        ("epoch", abi.u64),
    )


def status(group: abi.Group, rank: int) -> StatusWords:
    words = StatusWords()
    group.must(group.lib.lowlat_status_read(group.models[rank], ct.byref(words)))
    return words

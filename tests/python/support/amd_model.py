"""A model of the platform amd whose devices are ranks of a machine of tests/tools/amd, and steps of
it beside the same steps on another platform."""

import ctypes as ct

import numpy as np

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


class AmdGroup(abi.Group):
    platform = b"amd"

    def __init__(self, runtime: hip.Runtime, path, weights: small_model.Weights) -> None:
        self.runtime = runtime
        super().__init__(path, weights.small.config, weights.tp_size, weights.shard)

    def place(self, array, rank):
        """A copy in the device's memory, seen as an array."""
        made = self.runtime.machine
        address = made.allocate(max(array.nbytes, 1), "tensor", owner=rank)
        raw = (ct.c_uint8 * array.nbytes).from_address(address)
        out = np.frombuffer(raw, array.dtype).reshape(array.shape)
        out[...] = array
        return out

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

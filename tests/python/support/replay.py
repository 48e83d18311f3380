"""Two requests through the kernels, step by step, beside the oracle's dense computation.

The tokens are set beforehand, whatever the logits say: what is checked is what the kernels make of
them. Every row of logits and every committed row of every pool gets an error, |out - oracle| over
|oracle|, and the margin of the closest selection that the oracle met on the way to it.
"""

from dataclasses import dataclass, field

import numpy as np
from oracle.index import key_values
from oracle.rope_kv import unpack

from support import kernels_abi as abi
from support.small_model import COMMON, EVEN, STEPS

BLOCK = COMMON["draft_block"]
NOISE_KEY = 0x1D2A9C317E44B1F3
TEMPERATURES = (0.0, 0.7)
LOGIT_ROWS = 64  # of a chunk of a prompt that are compared, all where it has no more


@dataclass
class Request:
    text: np.ndarray  # every token, prompt and answer
    page_size: int
    image_token: int  # -1: none
    num_words: int  # tokens below the special ones
    page_table: np.ndarray
    state_slot: int
    end: int  # committed tokens when all steps are done
    done: int = 0  # committed tokens

    def slots(self, pos):
        return self.page_table[pos // self.page_size] * self.page_size + pos % self.page_size

    def rows_with_rejects(self, accepted):
        """Tokens of a verify step: the anchor and drafts, the first `accepted` of them right."""
        rows = self.text[self.done : self.done + BLOCK + 1].copy()
        wrong = (self.text[self.done + accepted + 1 : self.done + BLOCK + 1] + 7) % self.num_words
        if len(wrong) > 1 and self.image_token >= 0:
            wrong[1] = self.image_token  # a rejected image token must leave nothing behind
        rows[accepted + 1 :] = wrong
        return rows


@dataclass
class Rows:
    """Errors of one kind of row."""

    error: list = field(default_factory=list)
    margin: list = field(default_factory=list)

    def add(self, got, want, margin):
        error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
        self.error.extend(np.where(np.isfinite(error), error, np.inf))
        self.margin.extend(margin)


def row_margins(trace):
    """How close each row was to another selection in any layer: see oracle.model.Selection."""
    parts = (*trace.gates.values(), *trace.entries.values(), *trace.blocks.values())
    return np.min([part.margin for part in parts], axis=0)


def kv_rows(pool, slots, page_size):
    page, idx = pool[slots // page_size], slots % page_size
    rows = np.empty((len(slots), 584), np.uint8)
    for row, one, i in zip(rows, page, idx, strict=True):
        row[:576] = one[i * 576 : (i + 1) * 576]
        row[576:] = one[page_size * 576 + i * 8 : page_size * 576 + (i + 1) * 8]
    return unpack(rows)


def index_rows(pool, slots):
    """64 rows a page, each of codes and, behind the page's last row, four bytes of scales."""
    page, idx, codes = pool[slots // 64], slots % 64, pool.shape[1] // 64 - 4
    rows = np.empty((len(slots), codes + 4), np.uint8)
    for row, one, i in zip(rows, page, idx, strict=True):
        row[:codes] = one[i * codes : (i + 1) * codes]
        row[codes:] = one[64 * codes + i * 4 : 64 * codes + (i + 1) * 4]
    return key_values(rows)


class Replay:
    def __init__(self, group, model, seed, lengths=EVEN):
        rng = np.random.default_rng(seed)
        self.group, self.model, self.config, self.oracle_runs = group, model, model.config, {}
        self.lengths = lengths
        self.page_size, image_token = self.config["page_size"], self.config["image_token"]
        num_words = image_token if image_token >= 0 else self.config["draft_mask_token"]
        pages = rng.permutation(self.config["num_pages"]).astype(np.int32).reshape(2, -1)
        self.page_table_stride = pages.shape[1]
        self.requests = []
        for idx, (chunks, images) in enumerate(
            zip(self.lengths.chunks, self.lengths.images, strict=True)
        ):
            end = sum(chunks) + STEPS[idx]
            text = rng.integers(3, num_words, end + BLOCK + 1).astype(np.int32)
            text[list(images)] = image_token
            self.requests.append(
                Request(
                    text,
                    self.page_size,
                    image_token,
                    num_words,
                    page_table=pages[idx],
                    state_slot=1 - idx,
                    end=end,
                )
            )
        self.kinds = {}
        self.pending = []  # (slots, positions) of the last step's rows, for the draft
        self.drafts, self.verified = [], []  # what came out, for the acceptance rule

    def rows(self, kind):
        return self.kinds.setdefault(kind, Rows())

    def oracle(self, tokens):
        key = bytes(np.asarray(tokens, np.int32))
        if key not in self.oracle_runs:
            self.oracle_runs[key] = self.model.run(tokens)
        return self.oracle_runs[key]

    # ------------------------------------------------------------------ target

    def step(self, parts, mode, logit_rows=None):
        """parts: (request, tokens of its rows, how many are committed). Compares the logits."""
        lib = self.group.lib
        launch = lib.lowlat_plain_step_launch if mode == abi.EXTEND else lib.lowlat_step_launch
        counts = [len(tokens) for _, tokens, _ in parts]
        pos = [
            r.done + np.arange(n, dtype=np.int32)
            for (r, _, _), n in zip(parts, counts, strict=True)
        ]
        num_rows = sum(counts)
        slots = np.concatenate([r.slots(p) for (r, _, _), p in zip(parts, pos, strict=True)])
        history = np.zeros((len(parts), 3), np.int32)
        for row, (request, _, _) in zip(history, parts, strict=True):
            before = request.text[max(0, request.done - 3) : request.done]
            row[3 - len(before) :] = before
        wanted = np.arange(num_rows, dtype=np.int32) if logit_rows is None else logit_rows
        outs = []
        structs = []
        for _ in self.group.models:
            logits = np.full((len(wanted), self.config["vocab"]), np.nan, np.float32)
            argmax = np.full(len(wanted), -1, np.int32)
            outs.append((logits, argmax))
            structs.append(
                abi.Step(
                    mode=mode,
                    num_rows=num_rows,
                    batch_size=len(parts),
                    tokens_per_request=0 if mode == abi.EXTEND else counts[0],
                    page_table_stride=self.page_table_stride,
                    token_ids=np.concatenate([t for _, t, _ in parts]).astype(np.int32),
                    positions=np.concatenate(pos),
                    request_idx=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
                    slots=slots.astype(np.int32),
                    page_table=np.stack([r.page_table for r, _, _ in parts]),
                    history=history,
                    state_slots=np.array([r.state_slot for r, _, _ in parts], np.int32),
                    num_logit_rows=len(wanted),
                    logit_rows=wanted,
                    logits=logits,
                    argmax=argmax,
                )
            )
        self.group.launch(launch, structs)
        logits, argmax = outs[0]
        for other, other_argmax in outs[1:]:
            assert np.array_equal(logits.view(np.uint32), other.view(np.uint32))
            assert np.array_equal(argmax, other_argmax)
        assert np.array_equal(argmax, logits.argmax(1))
        self.compare_logits(parts, counts, mode, wanted, logits)
        self.pending = []
        for (request, _, committed), p in zip(parts, pos, strict=True):
            kept = np.arange(len(p)) < committed
            self.pending.append((np.where(kept, request.slots(p), -1), p))
            request.done += committed
        return logits

    def compare_logits(self, parts, counts, mode, wanted, logits):
        first = 0
        for (request, tokens, committed), count in zip(parts, counts, strict=True):
            here = (first <= wanted) & (wanted < first + count)
            rows = wanted[here] - first
            first += count
            if committed == count:
                trace = self.oracle(request.text[: request.end])
            else:
                trace = self.oracle(np.concatenate([request.text[: request.done], tokens]))
            at = request.done + rows
            margin = row_margins(trace)
            name = {abi.DECODE: "decode", abi.VERIFY: "verify", abi.EXTEND: "prompt"}[mode]
            image = tokens[rows] == self.config["image_token"]
            for kind, chosen in ((name, ~image), ("image", image)):
                if chosen.any():
                    got, pick = logits[here][chosen], at[chosen]
                    self.rows(kind).add(got, trace.logits[pick], margin[pick])

    # ------------------------------------------------------------------ draft

    def draft(self, requests, plain):
        """Injects the last step's rows and, with requests, proposes for them."""
        lib = self.group.lib
        launch = lib.lowlat_plain_draft_launch if plain else lib.lowlat_draft_launch
        num = len(requests)
        temperature = np.array([TEMPERATURES[r.state_slot] for r in requests], np.float32)
        after = [r.done + np.arange(BLOCK) for r in requests]
        noise_row = np.arange(num, dtype=np.int32)[::-1].copy()
        noise_offset = np.array([3, (1 << 32) + 5], np.int64)[:num]
        outs, structs = [], []
        for _ in self.group.models:
            outs.append(
                (
                    np.full((num, BLOCK), -1, np.int32),
                    np.full((num, BLOCK, self.config["vocab"]), np.nan, np.float32),
                )
            )
            structs.append(
                abi.Draft(
                    num_inject_rows=sum(len(p) for _, p in self.pending),
                    inject_slots=np.concatenate([s for s, _ in self.pending]).astype(np.int32),
                    inject_positions=np.concatenate([p for _, p in self.pending]).astype(np.int32),
                    batch_size=num,
                    page_table_stride=self.page_table_stride,
                    anchors=np.array([r.text[r.done] for r in requests], np.int32),
                    prefixes=np.array([r.done for r in requests], np.int32),
                    slots=np.array(
                        [r.slots(p) for r, p in zip(requests, after, strict=True)], np.int32
                    ),
                    page_table=np.array([r.page_table for r in requests], np.int32),
                    temperature=temperature,
                    noise_row=noise_row,
                    noise_offset=noise_offset,
                    noise_key=NOISE_KEY,
                    draft_tokens=outs[-1][0],
                    draft_logits=outs[-1][1],
                )
            )
        self.group.launch(launch, structs)
        tokens, logits = outs[0]
        for other_tokens, other_logits in outs[1:]:
            assert np.array_equal(tokens, other_tokens)
            assert np.array_equal(logits.view(np.uint32), other_logits.view(np.uint32))
        for idx, request in enumerate(requests):
            # All of the text: what a row leaves behind does not depend on the rows after it.
            trace = self.oracle(request.text[: request.end])
            anchor = request.text[request.done]
            base, margin = self.model.draft(trace.features[: request.done], anchor)
            # A context row that took another expert moves the whole block.
            context = row_margins(trace)[
                max(0, request.done - self.config["window"]) : request.done
            ]
            margin = np.minimum(margin, context.min())
            noise = (noise_row[idx], noise_offset[idx], NOISE_KEY)
            want, keys = self.model.markov(base, anchor, tokens[idx], temperature[idx], noise)
            self.rows("draft").add(logits[idx], want, margin)
            # A proposal is the best of its step or was as good as that within the logits' error.
            lost = keys.max(1) - np.take_along_axis(keys, tokens[idx][:, None], 1)[:, 0]
            wrong = np.abs(logits[idx] - want).max(1) / max(temperature[idx] or 1.0, 1e-5)
            picks = self.rows("proposals")
            picks.error.extend(lost - 2.0 * wrong)
            picks.margin.extend(margin)
        return tokens, logits

    # ------------------------------------------------------------------ pools

    def overlap(self, ratio):
        """How many tokens before its own an entry is made of too."""
        return ratio if ratio == 4 else 0

    def compare_pools(self):
        for pools in self.group.pools[1:]:
            for name, pool in pools.items():
                assert np.array_equal(pool, self.group.pools[0][name], equal_nan=True), name
        pools = self.group.pools[0]
        for request in self.requests:
            assert request.done == request.end
            pos = np.arange(request.done)
            trace = self.oracle(request.text[: request.done])
            margin = row_margins(trace)
            for layer, plan in enumerate(self.model.config["layers"]):
                got = kv_rows(pools[f"kv.swa.{layer}"], request.slots(pos), self.page_size)
                self.rows(f"kv.swa.{layer}").add(got, trace.swa[layer], margin)
                if plan["kv_source"] != layer:
                    continue
                ratio = plan["ratio"]
                first = pos[: len(pos) // ratio] * ratio
                slots = request.slots(first) // ratio
                got = kv_rows(pools[f"kv.extra.{layer}"], slots, self.page_size // ratio)
                closest = [margin[max(0, f - self.overlap(ratio)) : f + ratio].min() for f in first]
                self.rows(f"kv.extra.{layer}").add(got, trace.extra[layer], closest)
                if layer in trace.index:
                    got = index_rows(pools[f"kv.index.{layer}"], slots)
                    self.rows(f"kv.index.{layer}").add(got, trace.index[layer], closest)
            context = self.model.draft_context(trace.features)
            for stage, keys in enumerate(context):
                got = kv_rows(pools[f"mtp.{stage}.kv.swa"], request.slots(pos), self.page_size)
                self.rows(f"mtp.{stage}.kv.swa").add(got, keys, margin)

    # ------------------------------------------------------------------ the whole of it

    def run(self):
        """Prompts in chunks of odd and even length, verify steps with rejects, decodes, drafts."""
        a, b = self.requests

        def prompt(request, count):
            return request, request.text[request.done : request.done + count], count

        def verify(request, accepted):
            return request, request.rows_with_rejects(accepted), accepted + 1

        (a_first, a_second), (b_first, b_second) = self.lengths.chunks
        self.step([prompt(a, a_first)], abi.EXTEND)
        self.draft([], plain=True)
        rows = b_first + a_second
        wanted = np.unique(np.linspace(0, rows - 1, LOGIT_ROWS).astype(np.int32))
        self.step([prompt(b, b_first), prompt(a, a_second)], abi.EXTEND, logit_rows=wanted)
        self.draft([], plain=True)
        self.step([prompt(b, b_second)], abi.EXTEND, logit_rows=np.array([0, 3, 6], np.int32))
        self.drafts.append(self.draft([a, b], plain=False))
        self.verified.append(self.step([verify(a, 1), verify(b, 0)], abi.VERIFY))
        self.drafts.append(self.draft([b, a], plain=False))
        self.verified.append(self.step([verify(b, 2), verify(a, 5)], abi.VERIFY))
        self.draft([], plain=False)
        self.step([verify(a, 1)], abi.VERIFY)
        self.draft([a], plain=False)
        self.step([prompt(a, 1), prompt(b, 1)], abi.DECODE)
        self.draft([], plain=True)
        self.step([prompt(b, 1)], abi.DECODE)
        self.draft([b], plain=True)
        self.compare_pools()
        return self.kinds

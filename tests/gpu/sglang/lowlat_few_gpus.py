"""The plugin's specs for tests on few GPUs, where a model has any number of layers. All else, the
kernels above all, is the plugin's own. Variables of the environment say more:

    LOWLAT_TEST_RANKS=4     the model is one rank's share of so many, and looped kernels run it: a
                            rank that is its own peers, so by the kernels of many ranks
    LOWLAT_TEST_BESIDE=1    each covered step that no graph runs is run by SGLang too, and once more
                            from embeddings that lie a rounding beside: what differs is logged
    LOWLAT_TEST_KEEP=DIR    of the first such steps of one request rows and features go there
    LOWLAT_TEST_ABORT=FILE  when this file appears the kernels are aborted
    LOWLAT_TEST_EAGER=FILE  while this file exists no step runs as a CUDA graph
"""

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from every_arm import RANKS, Switch, wait_for
from lowlat import build, env, guard, unwaited
from lowlat.kernels import HostedKernels, Platform, given
from lowlat.models import deepseek_v4
from lowlat.specs import nvidia
from msgspec.structs import replace
from sglang.kernels.plugin_kernels.nvidia.spec import register
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

logger = logging.getLogger(__name__)

# What a shorter model on fewer GPUs is refused for: tp_size, and fields of the model.
REFUSED = ("[102]", "[104]")
# The scalar kernels' requirements ask for no sizes.
PLACE = "scalar"
# Divided by the ranks in a model's share.
SHARED = ("num_heads", "o_groups", "moe_intermediate", "vocab")
# What every rank adds to a sum; as many equal parts are the whole, to the last bit when the ranks
# are a power of two.
SUMMED_SCALES = ("attn.wo_b.scale", "ffn.experts.w2.scale", "ffn.shared_experts.w2.scale")
WHOLE = ("tid2eid", "markov_w1.weight")
KEPT_STEPS = 3
# What engine.py looks for in the log; JSON follows.
BESIDE = "beside: "
ABORTED = "the kernels are aborted now: "
REPLAYED = "a graph ran behind the abort: "
STEPS = "steps of "

aborted = threading.Event()


class Looped(HostedKernels):
    """The kernels of rank 0, whose peers are itself, over a model that is its share."""

    def __init__(self, request: Any, platform: Platform) -> None:
        # Tables of the whole vocabulary, of which no other rank's tokens come.
        tensors = {
            name: tensor.repeat(RANKS, 1) if name.endswith(WHOLE) else tensor
            for name, tensor in request.tensors.items()
        }
        super().__init__(dataclasses.replace(request, tensors=tensors), platform)

    def model_config(self) -> dict[str, Any]:
        config = super().model_config()
        whole = {name: RANKS * config[name] for name in SHARED}
        return config | whole | {"tp_rank": 0, "tp_size": RANKS}

    def bind(self) -> None:
        super().bind()
        for name, tensor in list(self.bound.items()):
            if name == "embed.weight":
                self.bind_part(name, tensor / RANKS, None)
            elif name.endswith(SUMMED_SCALES):
                codes = tensor.view(torch.uint8) - (RANKS.bit_length() - 1)
                self.bind_part(name, codes, "ue8m0")

    def attach(self, model: Any) -> None:
        if self.is_ready:
            return
        if self.request.stages:
            part = model.embed_tokens.weight / RANKS
            self.relaid.append(part)
            model = SimpleNamespace(
                lm_head=model.lm_head, embed_tokens=SimpleNamespace(weight=part)
            )
        super().attach(model)

    def draft(self, *, out_logits: Any, **arrays: Any) -> Any:
        """Logits of the whole vocabulary, of which this rank's come first."""
        if out_logits is None:
            return super().draft(out_logits=None, **arrays)
        count = out_logits.shape[-1]
        whole = out_logits.new_zeros(*out_logits.shape[:-1], RANKS * count)
        out = super().draft(out_logits=whole, **arrays)
        out_logits.copy_(whole[..., :count])
        return out

    def bind_part(self, name: str, part: Any, dtype: str | None) -> None:
        self.relaid.append(part)
        self.bound[name] = part
        self.model.bind(name, given(part, dtype))


def few_layers(cfg: Any, hf_config: Any) -> list[str]:
    reasons = guard.config_disable_reasons(cfg, hf_config)
    return [line for line in reasons if not line.startswith(REFUSED)]


def opened(request: Any, layers: tuple[int, ...] = ()) -> HostedKernels:
    """The kernels for a request; with `layers` those whose features are of these."""
    kind, word = (Looped, "nvidia:loop") if RANKS > 1 else (HostedKernels, "nvidia")
    if layers:
        kind = type("AtLayers", (AtLayers, kind), {"layers": layers})
    return kind(request, Platform(word, True))


class AtLayers:
    """Kernels whose features are of other layers than those that the draft reads."""

    layers: tuple[int, ...] = ()

    def model_config(self) -> dict[str, Any]:
        return super().model_config() | {"draft_target_layers": list(self.layers)}


class Beside:
    """A built target whose steps are SGLang's too, for the same rows over the same caches: what
    either writes is what the other writes, but for roundings. `request` is what its kernels were
    made from: more of them give the features of every layer."""

    def __init__(self, built: Any, request: Any) -> None:
        self.built = built
        self.inner = built.model.model
        self.steps = self.kept = 0
        self.request, self.all = request, None

    def every_kernels(self) -> list[HostedKernels]:
        """Kernels that together give the features of every layer. Made when the first step is
        compared: what was timed before is without them."""
        if self.all is not None:
            return self.all
        self.all, request = [], self.request
        each, count = self.built.kernels.config["num_draft_stages"], len(self.inner.layers)
        # Of several GPUs they would have to meet their peers.
        for first in range(0, count if each and request.tp_size == 1 else 0, max(each, 1)):
            # As many as the draft reads, so that the last ones may come twice.
            layers = tuple(min(first + i, count - 1) for i in range(each))
            kernels = opened(request, layers)
            kernels.become_ready()
            self.all.append(kernels)
        return self.all

    def __getattr__(self, name: str) -> Any:
        return getattr(self.built, name)

    def forward(self, step, original, input_ids, positions, forward_batch, *args, **kwargs):
        def ours():
            return self.built.forward(
                step, original, input_ids, positions, forward_batch, *args, **kwargs
            )

        if torch.cuda.is_current_stream_capturing() or pads(step):
            return ours()
        every = self.every_kernels()
        hasher = getattr(self.inner, "engram_hasher", None)
        before = None if hasher is None else hasher.history.clone()

        def theirs(embeds=None):
            if hasher is not None:
                # A decode step moves its token in, which is the next step's then.
                hasher.history.copy_(before)
            with every_layer(self.inner) as layers:
                out = original(input_ids, positions, forward_batch, embeds)
            return out.next_token_logits.clone(), layers[0] if every else None

        moved = theirs(a_rounding_beside(self.inner.embed_tokens(input_ids)))
        again, theirs = theirs(), theirs()
        parts = []
        for kernels in every:
            if hasher is not None:
                hasher.history.copy_(before)
            features = kernels.step(step, input_ids, positions, forward_batch).aux_hidden
            parts.append(features.unflatten(-1, (len(kernels.layers), -1)))
        if hasher is not None:
            hasher.history.copy_(before)
        out = ours()
        layers = torch.cat(parts, 1)[:, : len(self.inner.layers)] if parts else None
        mine = out.next_token_logits, layers
        self.tell(step, mine, theirs, moved, again)
        self.keep(step, input_ids, positions, mine, theirs, moved)
        return out

    def tell(self, step, mine, theirs, moved, again) -> None:
        self.steps += 1
        tell(
            mode=step.mode,
            rows=step.rows,
            logits=spread(mine[0], theirs[0]),
            moved_logits=spread(moved[0], theirs[0]),
            again_logits=spread(again[0], theirs[0]),
            best=float((mine[0].argmax(-1) == theirs[0].argmax(-1)).float().mean()),
            moved_best=float((moved[0].argmax(-1) == theirs[0].argmax(-1)).float().mean()),
            layers=of_layers(mine[1], theirs[1]),
            moved_layers=of_layers(moved[1], theirs[1]),
        )

    def keep(self, step, input_ids, positions, mine, theirs, moved) -> None:
        folder = os.environ.get("LOWLAT_TEST_KEEP")
        one_request = step.rows == self.built.planner.tokens_per_request
        if not folder or not one_request or self.kept == KEPT_STEPS:
            return
        arrays = {"ids": input_ids, "positions": positions}
        for name, (logits, layers) in (("ours", mine), ("sglang", theirs), ("moved", moved)):
            if layers is None:
                return
            arrays[f"{name}_logits"] = logits.to(torch.bfloat16).view(torch.int16)
            arrays[f"{name}_layers"] = layers.view(torch.int16)
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"step{self.kept}.npz"
        np.savez(path, **{name: array.cpu().numpy() for name, array in arrays.items()})
        self.kept += 1


class DraftBeside:
    """The same of a draft's layers, in blocks that no graph runs."""

    def __init__(self, built: Any) -> None:
        self.built = built

    def __getattr__(self, name: str) -> Any:
        return getattr(self.built, name)

    def forward(self, step, original, input_ids, positions, forward_batch, *args, **kwargs):
        def ours():
            return self.built.forward(
                step, original, input_ids, positions, forward_batch, *args, **kwargs
            )

        def theirs(embeds=None):
            return original(input_ids, positions, forward_batch, embeds).hidden_states.clone()

        if torch.cuda.is_current_stream_capturing() or pads(step):
            return ours()
        model = self.built.model
        embeds = a_rounding_beside(model.embed_tokens(input_ids))
        moved = theirs(embeds.unsqueeze(1).repeat(1, model.hc_mult, 1))
        beside, out = theirs(), ours()
        tell(
            mode="draft",
            rows=step.rows,
            hidden=spread(out.hidden_states, beside),
            moved_hidden=spread(moved, beside),
        )
        return out


@contextlib.contextmanager
def every_layer(inner: Any) -> Any:
    """While it lasts SGLang's own forward leaves the features of every layer in what this gives,
    [rows, layers, hidden]."""
    real, chosen, count = inner.forward, inner.dspark_layers_to_capture, len(inner.layers)
    found: list[Any] = []

    def forward(*args, **kwargs):
        if chosen is None:  # decoding without drafts
            found.append(None)
            return real(*args, **kwargs)
        inner.dspark_layers_to_capture = list(range(count))
        try:
            hidden, features = real(*args, **kwargs)
        finally:
            inner.dspark_layers_to_capture = chosen
        found.append(features.unflatten(-1, (count, -1)))
        return hidden, found[0][:, chosen].flatten(1)

    inner.forward = forward
    try:
        yield found
    finally:
        del inner.forward


def a_rounding_beside(values: Any) -> Any:
    """bf16 values, of which one in sixteen is its neighbour, the same ones on every rank: together
    0.0014 of them, about what one rounding leaves."""
    generator = torch.Generator(values.device).manual_seed(1)
    random = torch.randint(0, 32, values.shape, device=values.device, generator=generator)
    bits = values.view(torch.int16)
    has_neighbours = (bits & 0x7FFF) > 1
    return (bits + has_neighbours * ((random == 0).short() - (random == 1).short())).view(
        torch.bfloat16
    )


def tell(**words: Any) -> None:
    logger.warning("%s%s", BESIDE, json.dumps(words))


def of_layers(ours: Any, theirs: Any) -> list[float]:
    """The median over rows, a layer."""
    if ours is None:
        return []
    pairs = zip(ours.unbind(1), theirs.unbind(1), strict=True)
    return [spread(one, other)[0] for one, other in pairs]


def spread(ours: Any, theirs: Any) -> list[float]:
    """|ours - theirs| / |theirs| of the rows: the median, and the most."""
    of_rows = relative(ours, theirs)
    return [round(float(of_rows.median()), 6), round(float(of_rows.max()), 6)]


def pads(step: Any) -> bool:
    """Whether it is a step of nothing but padding, as before a capture."""
    return bool((step.view.metadata.core_attn_metadata.raw_out_loc < deepseek_v4.PAGE_SIZE).all())


def relative(ours: Any, theirs: Any) -> Any:
    """|ours - theirs| / |theirs| of each row."""
    a, b = ours.float().flatten(1), theirs.float().flatten(1)
    return (a - b).norm(dim=1) / b.norm(dim=1)


def target(model: Any, hf_config: Any, context: Any) -> Any:
    requests = []

    def open_kernels(request: Any) -> HostedKernels:
        requests.append(request)
        return opened(request)

    built = build.build_target(model, hf_config, context, open_kernels, build.place(PLACE))
    if os.environ.get("LOWLAT_TEST_ABORT"):
        threading.Thread(target=abort, args=[built.kernels.model], daemon=True).start()
    return Beside(built, requests[0]) if os.environ.get("LOWLAT_TEST_BESIDE") else built


def abort(model: Any) -> None:
    wait_for(Path(os.environ["LOWLAT_TEST_ABORT"]))
    logger.warning("%s%s", ABORTED, json.dumps({"pid": os.getpid(), "time": time.time()}))
    model.abort()
    aborted.set()


def draft(model: Any, hf_config: Any, context: Any) -> Any:
    where = build.place(PLACE)
    stages = RANKS * where.tp_size in guard.FUSED_RANKS and not env.takes_slow_ranks()
    built = build.build_draft(model, hf_config, context, opened, where, stages)
    unwaited.install()
    return DraftBeside(built) if os.environ.get("LOWLAT_TEST_BESIDE") else built


REQUIRES = replace(nvidia.requirements(), tp_sizes=frozenset({1, 2, 4, 8}), hf_config={})
TARGET = replace(nvidia.TARGET, requires=REQUIRES, build=target, config_disable_reasons=few_layers)
DRAFT = replace(nvidia.DRAFT, requires=REQUIRES, build=draft)


def register_nvidia() -> None:
    """The entry point ``nvidia_megakernel``, in the place of the plugin's."""
    register(architecture="DeepseekV4ForCausalLM", path="lowlat_few_gpus:TARGET")
    register(architecture="DeepseekV4ForCausalLMDSpark", path="lowlat_few_gpus:DRAFT")
    runner = DecodeCudaGraphRunner
    if os.environ.get("LOWLAT_TEST_EAGER"):
        runner.can_run_graph = unless_eager(runner.can_run_graph)
    if os.environ.get("LOWLAT_TEST_ABORT"):
        runner.execute = telling_of_an_abort(runner.execute)


def unless_eager(can_run_graph: Any) -> Any:
    """The runner's own answer, but no while the file exists. Logged whenever it is another."""
    switch = Switch(os.environ["LOWLAT_TEST_EAGER"])
    last = {}

    def answer(self: Any, forward_batch: Any) -> bool:
        runs = switch.read() is None and bool(can_run_graph(self, forward_batch))
        now = forward_batch.batch_size, runs
        if not self.model_runner.is_draft_worker and last.get(self) != now:
            last[self] = now
            logger.warning("%s%d requests, %s", STEPS, now[0], "a graph" if runs else "no graph")
        return runs

    return answer


def telling_of_an_abort(execute: Any) -> Any:
    """The runner's own, with a word about what the first graphs give that run behind an abort."""

    def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        was_aborted = aborted.is_set()
        out = execute(self, forward_batch, *args, **kwargs)
        logits = getattr(out, "next_token_logits", None)
        if was_aborted and logits is not None:
            nan = float(logits.isnan().float().mean())
            words = {"nan": nan, "rows": len(logits), "time": time.time()}
            logger.warning("%s%s", REPLAYED, json.dumps(words))
        return out

    return run

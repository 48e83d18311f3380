"""The plugin's specs for tests on few GPUs, where a model has any number of layers. All else, the
kernels above all, is the plugin's own. Variables of the environment say more:

    LOWLAT_TEST_RANKS=4     the model is one rank's share of so many, and looped kernels run it: a
                            rank that is its own peers, so by the kernels of many ranks
    LOWLAT_TEST_BESIDE=1    each covered step is run by SGLang too, and what differs is logged
    LOWLAT_TEST_ABORT=FILE  when this file appears the kernels are aborted
    LOWLAT_TEST_EAGER=FILE  while this file exists no step runs as a CUDA graph
    LOWLAT_TEST_BIAS=4      spread of the biases that choose experts; 0 leaves it to the scores
    LOWLAT_TEST_FREE=FILE   when this file appears the biases become 0
"""

import dataclasses
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lowlat import build, env, guard
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
RANKS = int(os.environ.get("LOWLAT_TEST_RANKS", "1"))
# Divided by the ranks in a model's share.
SHARED = ("num_heads", "o_groups", "moe_intermediate", "vocab")
# What every rank adds to a sum; as many equal parts are the whole, to the last bit when the ranks
# are a power of two.
SUMMED_SCALES = ("attn.wo_b.scale", "ffn.experts.w2.scale", "ffn.shared_experts.w2.scale")
WHOLE = ("tid2eid", "markov_w1.weight")
UE8M0_OF_ONE = 127
PADDED_HEADS = 64


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


def looped(request: Any) -> HostedKernels:
    return Looped(request, Platform("nvidia:loop", True))


class Beside:
    """A built target whose steps are SGLang's too, for the same rows over the same caches: what
    either writes is what the other writes, but for roundings."""

    def __init__(self, built: Any) -> None:
        self.built = built
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.built, name)

    def forward(self, step, original, input_ids, positions, forward_batch, *args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            return self.built.forward(
                step, original, input_ids, positions, forward_batch, *args, **kwargs
            )
        hasher = getattr(self.built.model.model, "engram_hasher", None)
        before = None if hasher is None else hasher.history.clone()
        theirs = original(input_ids, positions, forward_batch, *args, **kwargs)
        logits, hidden = theirs.next_token_logits.clone(), theirs.hidden_states
        hidden = None if hidden is None else hidden.clone()
        if hasher is not None:
            # A decode step moves its token in, which is the caller's next step then.
            hasher.history.copy_(before)
        ours = self.built.forward(
            step, original, input_ids, positions, forward_batch, *args, **kwargs
        )
        if not pads(step):
            self.tell(step, logits, ours.next_token_logits, hidden, ours.hidden_states)
        return ours

    def tell(self, step, logits, our_logits, hidden, our_hidden) -> None:
        self.steps += 1
        differing = relative(our_logits, logits)
        equal = int((our_logits.argmax(-1) == logits.argmax(-1)).sum())
        line = (
            f"beside: step {self.steps} {step.mode} {step.rows} rows: logits median"
            f" {float(differing.median()):.5f} most {float(differing.max()):.5f}, best token equal"
            f" in {equal} of {len(logits)}"
        )
        if hidden is not None and our_hidden is not None and hidden.shape == our_hidden.shape:
            of_rows = relative(our_hidden, hidden)
            width = self.built.model.config.hidden_size
            parts = [
                float(relative(a, b).median())
                for a, b in zip(our_hidden.split(width, -1), hidden.split(width, -1), strict=True)
            ]
            line += (
                f"; features median {float(of_rows.median()):.5f} most {float(of_rows.max()):.5f},"
                f" by layer {' '.join(f'{part:.5f}' for part in parts)}"
            )
        logger.warning("%s", line)


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

        if torch.cuda.is_current_stream_capturing():
            return ours()
        theirs = original(input_ids, positions, forward_batch, *args, **kwargs).hidden_states
        theirs, out = theirs.clone(), ours()
        if pads(step):
            return out
        of_rows = relative(out.hidden_states, theirs)
        logger.warning(
            "beside: draft of %d rows: hidden states median %.5f most %.5f",
            step.rows,
            float(of_rows.median()),
            float(of_rows.max()),
        )
        return out


def pads(step: Any) -> bool:
    """Whether it is a step of nothing but padding, as before a capture."""
    return bool((step.view.metadata.core_attn_metadata.raw_out_loc < deepseek_v4.PAGE_SIZE).all())


def relative(ours: Any, theirs: Any) -> Any:
    """|ours - theirs| / |theirs| of each row."""
    a, b = ours.float().flatten(1), theirs.float().flatten(1)
    return (a - b).norm(dim=1) / b.norm(dim=1)


def target(model: Any, hf_config: Any, context: Any) -> Any:
    open_kernels = looped if RANKS > 1 else build.nvidia_kernels
    built = build.build_target(model, hf_config, context, open_kernels, build.place(PLACE))
    if os.environ.get("LOWLAT_TEST_ABORT"):
        threading.Thread(target=abort, args=[built.kernels.model], daemon=True).start()
    return Beside(built) if os.environ.get("LOWLAT_TEST_BESIDE") else built


def abort(model: Any) -> None:
    wait_for(Path(os.environ["LOWLAT_TEST_ABORT"]))
    logger.warning("the kernels are aborted now")
    model.abort()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 3600
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def draft(model: Any, hf_config: Any, context: Any) -> Any:
    where, open_kernels = build.place(PLACE), looped if RANKS > 1 else build.nvidia_kernels
    stages = RANKS * where.tp_size in guard.FUSED_RANKS and not env.takes_slow_ranks()
    built = build.build_draft(model, hf_config, context, open_kernels, where, stages)
    return DraftBeside(built) if os.environ.get("LOWLAT_TEST_BESIDE") else built


REQUIRES = replace(nvidia.requirements(), tp_sizes=frozenset({1, 2, 4, 8}), hf_config={})
TARGET = replace(nvidia.TARGET, requires=REQUIRES, build=target, config_disable_reasons=few_layers)
DRAFT = replace(nvidia.DRAFT, requires=REQUIRES, build=draft)


def register_nvidia() -> None:
    """The entry point ``nvidia_megakernel``, in the place of the plugin's."""
    register(architecture="DeepseekV4ForCausalLM", path="lowlat_few_gpus:TARGET")
    register(architecture="DeepseekV4ForCausalLMDSpark", path="lowlat_few_gpus:DRAFT")
    if os.environ.get("LOWLAT_TEST_EAGER"):
        DecodeCudaGraphRunner.can_run_graph = unless_eager(DecodeCudaGraphRunner.can_run_graph)


def unless_eager(can_run_graph: Any) -> Any:
    """The runner's own answer, but no while the file exists."""
    path = Path(os.environ["LOWLAT_TEST_EAGER"])

    def answer(self: Any, forward_batch: Any) -> bool:
        return not path.exists() and can_run_graph(self, forward_batch)

    return answer


# ------------------------------------------------------------------ weights


def dummy_weights() -> None:
    """An entry point too, in both arms: SGLang's own dummy weights are zeros in fp8, and leave
    fp4's bytes as they were."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = initialize


def initialize(model: Any) -> None:
    """Random weights whose products have the size of their inputs, the same in every process."""
    if RANKS > 1:
        for kind in {type(part) for part in model.modules()}:
            if hasattr(kind, "_local_attn_sink"):
                pad_heads(kind)
    # Buffers hold what follows from the configuration, but for a hash layer's table.
    tables = [(name, table) for name, table in model.named_buffers() if name.endswith("tid2eid")]
    for idx, (name, tensor) in enumerate(sorted([*model.named_parameters(), *tables])):
        if tensor.numel():
            fill(name, tensor.detach(), torch.Generator(tensor.device).manual_seed(idx))
    if os.environ.get("LOWLAT_TEST_FREE"):
        threading.Thread(target=free, args=[model], daemon=True).start()


def free(model: Any) -> None:
    """To compare, biases choose the experts: scores that lie close would choose others by the last
    bit of what came before. To time, scores choose."""
    wait_for(Path(os.environ["LOWLAT_TEST_FREE"]))
    for name, tensor in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            tensor.detach().zero_()


def pad_heads(attention: type) -> None:
    """SGLang's attention kernels have 64 heads or more. Where ranks share them, SGLang pads a
    rank's and its sink; here the rank is alone."""

    def sink(self: Any, kernel_num_heads: int | None = None) -> Any:
        if self._attn_sink_local is None:
            self._attn_sink_local = self.attn_sink.new_zeros(PADDED_HEADS)
            self._attn_sink_local[: self.n_local_heads] = self.attn_sink
        return self._attn_sink_local[:kernel_num_heads]

    attention._kernel_num_heads = lambda self, num_tokens: PADDED_HEADS
    attention._local_attn_sink = sink


def fill(name: str, tensor: Any, generator: Any) -> None:
    last = name.rsplit(".", 1)[-1]
    if tensor.dtype == torch.float8_e8m0fnu:
        # A row of 5120 values of fp4, whose mean square is 8.6.
        tensor.view(torch.uint8).fill_(UE8M0_OF_ONE - 8)
    elif last.endswith("scale_inv"):
        tensor.fill_(2.0**-6)
    elif tensor.dtype == torch.float8_e4m3fn:
        codes(tensor, generator)
    elif tensor.dtype in (torch.int8, torch.uint8):
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    elif name.endswith("self_attn.wo_a.weight"):
        # Expanded from fp8 blocks, in a checkpoint.
        exact = tensor.new_empty(tensor.shape, dtype=torch.float8_e4m3fn)
        codes(exact, generator)
        tensor.copy_(exact.to(tensor.dtype) * 2.0**-6)
    elif last == "tid2eid":
        tensor.random_(0, 256, generator=generator)
    elif not tensor.is_floating_point():
        return
    elif "norm" in name and tensor.ndim == 1:
        tensor.fill_(1.0)
    elif last == "e_score_correction_bias":
        tensor.normal_(0.0, 1.0, generator=generator)
        tensor.mul_(float(os.environ.get("LOWLAT_TEST_BIAS", "0")))
    elif "hc_" in last and tensor.ndim == 1:
        tensor.normal_(0.0, 0.1, generator=generator)
    elif tensor.ndim >= 2:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
    else:
        tensor.zero_()


def codes(tensor: Any, generator: Any) -> None:
    """Normal values as e4m3, in pieces that a temporary has room for."""
    flat, piece = tensor.view(-1), 1 << 26
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece]
        values = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
        part.copy_(values.normal_(generator=generator).to(tensor.dtype))

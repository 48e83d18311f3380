"""Runs covered steps: the objects that a build hands to SGLang. Nothing of this runs at the replay
of a graph, only while one is captured and in steps that no graph runs.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowlat.capture import Planner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a covered step gives to SGLang's head.

    `hidden` [rows, hidden] after the last norm; `aux_hidden` what the draft reads, as SGLang's own
    forward passes it, or None where it captures none; `before_norm` as SGLang's own.
    """

    hidden: Any
    aux_hidden: Any = None
    before_norm: Any = None


class Built:
    """A built model, whatever the contract: `kernels` run what `planner` covers, over the tensors
    that `weights` gives."""

    def __init__(
        self,
        model: Any,
        kernels: Any,
        planner: Planner,
        weights: Callable[[], dict[str, Any]],
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.planner = planner
        self.weights = weights

    def covers(
        self, view: Callable[[], Any], input_ids: Any, forward_batch: Any, given: Any
    ) -> bool:
        """Whether this step is ours; outside a capture also whether the graphs' reads still lie
        where they were. `view` gives the forward's attention data."""
        if not is_capturing():
            self.planner.check(lambda: self.reads(view()))
        return self.planner.covers(input_ids, forward_batch, given)

    def reads(self, view: Any) -> dict[str, Any]:
        """Everything that a captured graph reads and nobody stages for it."""
        return {**self.weights(), **self.kernels.reads(view)}

    def seal(self, step: Any, forward_batch: Any) -> None:
        """Notes what the graph reads that is being captured."""
        if is_capturing():
            self.planner.seal(forward_batch, lambda: self.reads(step.view))


class Target(Built):
    """A built target."""

    def summary(self) -> str:
        mine = self.kernels.own_bytes / 2**20
        return f"{self.kernels.shape}, weights in place, {mine:.1f} MiB beside them"

    def report(self) -> dict[str, Any]:
        """Covered and uncovered steps so far, those by reason."""
        return json.loads(self.planner.dispatcher.report())

    def run(self, step: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        """The layers by our kernels, then SGLang's own head. `step` has a mode, rows and a view."""
        self.seal(step, forward_batch)
        out = self.kernels.step(step, input_ids, positions, forward_batch)
        return self.model.logits_processor(
            input_ids,
            out.hidden,
            self.model.lm_head,
            forward_batch,
            out.aux_hidden,
            hidden_states_before_norm=None if out.aux_hidden is not None else out.before_norm,
        )


class Megakernel:
    """What a built target and a built draft of the NVIDIA contract have in common."""

    def forward(
        self,
        step: Any,
        original: Callable[..., Any],
        input_ids: Any,
        positions: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A step that `plan` gave."""
        return self.run(step, input_ids, positions, forward_batch)


class TargetMegakernel(Megakernel, Target):
    """SGLang's ``BuiltMegakernel``."""

    draft_sampler = None

    def __init__(
        self,
        model: Any,
        kernels: Any,
        planner: Planner,
        weights: Callable[[], dict[str, Any]],
        widths: tuple[int, ...],
        binding: Any,
    ) -> None:
        super().__init__(model, kernels, planner, weights)
        self.widths = widths
        self.binding = binding

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The step to run, or None for SGLang's own forward."""
        from sglang.kernels.plugin_kernels.nvidia.spec import Step

        given = (*args, *kwargs.values())
        if not self.covers(self.binding.forward_view, input_ids, forward_batch, given):
            return None
        return Step(mode=self.planner.mode, rows=int(input_ids.shape[0]))


class View:
    """A forward's attention data under the names of the NVIDIA contract's view."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    @property
    def metadata(self) -> Any:
        return self.backend.forward_metadata

    @property
    def kv_pool(self) -> Any:
        return PoolFace(self.backend.token_to_kv_pool)

    @property
    def swa_out_cache_loc(self) -> Callable[[Any], Any]:
        return self.backend.get_swa_out_cache_loc


class RoutedStep(NamedTuple):
    """A step that SGLang routed to the AMD kernels."""

    mode: str
    rows: int
    view: View


class Monokernels:
    """SGLang's ``BuiltMonokernels``, over a ``Target`` or a ``Draft``. SGLang routes by a step's
    shape; what else makes a step not ours runs `original`, the model's own forward."""

    def __init__(
        self,
        model: Any,
        kernels: Any,
        planner: Planner,
        weights: Callable[[], dict[str, Any]],
        original: Callable[..., Any],
    ) -> None:
        super().__init__(model, kernels, planner, weights)
        self.original = original

    def forward(
        self,
        plan: Any,
        input_ids: Any,
        positions: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A step of a shape that was built."""
        if not self.covers(forward_view, input_ids, forward_batch, (*args, *kwargs.values())):
            return self.original(input_ids, positions, forward_batch, *args, **kwargs)
        step = RoutedStep(plan.key.forward_mode, plan.key.rows, forward_view())
        return self.run(step, input_ids, positions, forward_batch)


class TargetMonokernels(Monokernels, Target):
    """A target's."""


def forward_view() -> View:
    """Of the forward that runs now, where a contract gives none."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return View(get_attn_backend())


class PoolFace:
    """A pool as the NVIDIA contract's view shows it: its own names, and itself as `pool`."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)


class Draft(Built):
    """The layers of a built DSpark draft."""

    def covers(
        self, view: Callable[[], Any], input_ids: Any, forward_batch: Any, given: Any
    ) -> bool:
        """As of any model; before the target's head and embedding are attached nothing of the draft
        runs."""
        if self.model.embed_tokens is None:
            return False
        if not is_capturing():
            self.kernels.attach(self.model)
        return super().covers(view, input_ids, forward_batch, given)

    def run(self, step: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        """What the last layer left."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        self.seal(step, forward_batch)
        hidden = self.kernels.draft_layers(step, input_ids, positions, forward_batch)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)


class DraftMonokernels(Monokernels, Draft):
    """The AMD contract's, which has no sampler: proposals are SGLang's."""


class DraftMegakernel(Megakernel, Draft):
    """A built DSpark draft: it samples its proposals and, where `widths` are built, runs the layers
    before them."""

    def __init__(
        self,
        model: Any,
        kernels: Any,
        planner: Planner,
        gamma: int,
        widths: tuple[int, ...],
        binding: Any,
        weights: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(model, kernels, planner, weights)
        self.gamma = gamma
        self.widths = widths
        self.binding = binding

    def summary(self) -> str:
        layers = "layers and " if self.widths else ""
        return f"{self.kernels.shape}, {layers}proposals of {self.gamma} tokens"

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The step to run, or None for SGLang's own forward."""
        from sglang.kernels.plugin_kernels.nvidia.spec import Step

        given, view = (*args, *kwargs.values()), self.binding.forward_view
        if not self.widths or not self.covers(view, input_ids, forward_batch, given):
            return None
        return Step(mode="target_verify", rows=int(input_ids.shape[0]))

    def draft_sampler(
        self,
        *,
        gamma: int,
        max_bs: int,
        greedy_draft: bool,
        noise: Any,
        draft_tokens: Any,
        step_logits: Any,
        step_temperatures: Any,
    ) -> Callable[[int], Callable[..., Any] | None]:
        """The factory of the contract: gives, for a batch size, the step that samples a block, or
        None where SGLang samples it. Called when the target's head is attached."""
        self.kernels.attach(self.model)

        def steps(batch_size: int) -> Callable[..., Any] | None:
            covered, _ = self.planner.dispatcher.decide(
                "draft", batch_size, gamma, batch_size * gamma
            )
            if batch_size > max_bs or covered != batch_size:
                return None

            def step(hidden_states: Any, anchor_tokens: Any) -> tuple[Any, Any]:
                tokens = draft_tokens[: batch_size * gamma].view(batch_size, gamma)
                features = self.kernels.draft(
                    hidden=hidden_states,
                    # Column 0 of the block's ids, a strided view.
                    anchors=anchor_tokens.contiguous(),
                    temperatures=None if greedy_draft else step_temperatures[:batch_size],
                    noise_key=noise.key,
                    noise_offset=noise.offset,
                    out_tokens=tokens,
                    out_logits=None if greedy_draft else step_logits[:batch_size],
                )
                if not greedy_draft:
                    noise.offset.add_(1)
                return tokens, features

            return step

        return steps


def is_capturing() -> bool:
    """Whether this stream is being captured into a graph."""
    import torch

    return torch.cuda.is_current_stream_capturing()

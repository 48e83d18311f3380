"""Runs covered steps: the objects that a build hands to SGLang. Nothing of this runs at the replay
of a graph, only while one is captured and in steps that no graph runs.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class TargetMegakernel:
    """A built target: SGLang's ``BuiltMegakernel``."""

    draft_sampler = None

    def __init__(
        self,
        model: Any,
        kernels: Any,
        planner: Planner,
        widths: tuple[int, ...],
        binding: Any,
        weights: Callable[[], dict[str, Any]],
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.planner = planner
        self.widths = widths
        self.binding = binding
        self.weights = weights

    def summary(self) -> str:
        mine = self.kernels.own_bytes / 2**20
        return f"{self.kernels.shape}, weights in place, {mine:.1f} MiB beside them"

    def report(self) -> dict[str, Any]:
        """Covered and uncovered steps so far, those by reason."""
        return json.loads(self.planner.dispatcher.report())

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The step to run, or None for SGLang's own forward."""
        from sglang.kernels.plugin_kernels.nvidia.spec import Step

        if not is_capturing():
            self.planner.check(lambda: self.reads(self.binding.forward_view()))
        if not self.planner.covers(input_ids, forward_batch, (*args, *kwargs.values())):
            return None
        return Step(mode=self.planner.mode, rows=int(input_ids.shape[0]))

    def reads(self, view: Any) -> dict[str, Any]:
        """Everything that a captured graph reads and nobody stages for it."""
        return {**self.weights(), **self.kernels.reads(view)}

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
        """The layers by our kernels, then SGLang's own head."""
        if is_capturing():
            self.planner.seal(forward_batch, lambda: self.reads(step.view))
        out = self.kernels.step(step, input_ids, positions, forward_batch)
        return self.model.logits_processor(
            input_ids,
            out.hidden,
            self.model.lm_head,
            forward_batch,
            out.aux_hidden,
            hidden_states_before_norm=None if out.aux_hidden is not None else out.before_norm,
        )


class DraftMegakernel:
    """A built DSpark draft: it covers no step of the model, and samples its proposals."""

    widths = ()

    def __init__(self, model: Any, kernels: Any, dispatcher: Any, gamma: int) -> None:
        self.model = model
        self.kernels = kernels
        self.dispatcher = dispatcher
        self.gamma = gamma

    def summary(self) -> str:
        return f"{self.kernels.shape}, proposals of {self.gamma} tokens"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """No step of the draft's layers is ours."""
        return

    def forward(self, step: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Never asked for, since `plan` covers nothing."""
        return original(*args, **kwargs)

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
        self.kernels.attach(self.model.lm_head)

        def steps(batch_size: int) -> Callable[..., Any] | None:
            covered, _ = self.dispatcher.decide("draft", batch_size, gamma, batch_size * gamma)
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

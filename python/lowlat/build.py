"""Builds what a spec promises, before SGLang sizes its KV cache: weights bound where they lie, and
one agreement of all ranks. A rank that cannot build casts a ballot too, so that all refuse.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowlat import _dispatch, config, guard, unwaited
from lowlat.capture import Planner
from lowlat.models import deepseek_v4, published
from lowlat.reasons import RefusalError, refusal
from lowlat.replay import DraftMegakernel, DraftMonokernels, TargetMegakernel, TargetMonokernels

logger = logging.getLogger(__name__)

MAX_REQUESTS = 8
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """What the kernels of one rank are made from.

    `mode` is that of the steps, each with `tokens_per_request` rows a request, at `widths` rows.
    `tensors` are the loaded weights by SGLang's names, where they lie, their experts in
    `expert_layout`. `copies` are those of the checkpoint's tensors (models/published.py), or None
    where the loaded ones are read. `page_size` is in tokens, `device` the number of this rank's
    GPU. `stages`: of a draft its layers too, not the proposals alone. `dumps_crashes`: SGLang's
    launcher is to dump requests and GPUs before it ends a server that failed.
    """

    model: Any
    config_json: str
    mode: str
    tokens_per_request: int
    widths: tuple[int, ...]
    tensors: dict[str, Any]
    tp_rank: int
    tp_size: int
    wait_budget_ns: int
    page_size: int
    expert_layout: str
    device: int
    copies: dict[tuple, Any] | None = None
    stages: bool = False
    dumps_crashes: bool = False


class Kernels(Protocol):
    """The kernels of one model on one rank, weights bound. The texts and the digest must be the
    same on every rank."""

    own_bytes: int
    catalogue_digest: int
    shape: str
    numerics: str
    layout: str

    def export(self) -> bytes:
        """A handle by which the peers open this rank's memory."""

    def connect(self, handles: list[bytes]) -> None:
        """Opens the peers' memory, by every rank's handle."""

    def attach(self, model: Any) -> None:
        """The draft's head and embedding, before its first launch."""

    def reads(self, view: Any) -> dict[str, Any]:
        """The caches that steps read and write, by name, as `view` gives them now."""

    def step(self, step: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        """Runs a covered step and gives a ``replay.StepOutput``."""

    def draft_layers(self, step: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        """Runs the layers of a draft's block and gives what the last one left."""

    def draft(self, **arrays: Any) -> Any:
        """Proposes a block; the arguments are those of ``replay.DraftMegakernel.propose``."""


Open = Callable[[Request], Kernels]


@dataclass(frozen=True, slots=True)
class Place:
    """This rank in its group; `gather` is the group's all-gather of one object a rank."""

    tp_rank: int
    tp_size: int
    isa: str
    gather: Callable[[Any], list[Any]]


def nvidia_kernels(request: Request) -> Kernels:
    """The CUDA kernels over SGLang's weights and caches."""
    return library_kernels(request, "nvidia")


def amd_kernels(request: Request) -> Kernels:
    """The AMD kernels over copies of the weights and SGLang's caches."""
    return library_kernels(request, "amd")


def library_kernels(request: Request, word: str) -> Kernels:
    """The library's kernels for a platform."""
    reasons = guard.kernels_reasons(word)
    if reasons:
        raise RefusalError("kernels_missing", reasons)
    from lowlat.kernels import HostedKernels, Platform

    return HostedKernels(request, Platform(word, True))


def target(model: Any, hf_config: Any, context: Any) -> TargetMegakernel:
    """The NVIDIA spec's build of a DeepSeek-V4 or V4.1 target."""
    return build_target(model, hf_config, context, nvidia_kernels, place(guard.ISA))


def amd_target(model: Any, hf_config: Any, context: Any) -> TargetMonokernels:
    """The AMD spec's build of the same."""
    return build_amd_target(model, hf_config, context, amd_kernels, place(context.isa))


def draft(model: Any, hf_config: Any, context: Any) -> DraftMegakernel:
    """The NVIDIA spec's build of a DSpark draft."""
    where = place(guard.ISA)
    stages = guard.runs_draft_layers(model, where.tp_size)
    built = build_draft(model, hf_config, context, nvidia_kernels, where, stages)
    unwaited.install()
    return built


def amd_draft(model: Any, hf_config: Any, context: Any) -> DraftMonokernels:
    """The AMD spec's build of a DSpark draft."""
    return build_amd_draft(model, hf_config, context, amd_kernels, place(context.isa))


def place(isa: str) -> Place:
    """This process's rank, and an all-gather over SGLang's CPU group, whose timeout bounds it."""
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group, tp_size = parallel.tp_group, parallel.tp_size

    def gather(value: Any) -> list[Any]:
        if tp_size == 1:
            return [value]
        values: list[Any] = [None] * tp_size
        dist.all_gather_object(values, value, group=group.cpu_group)
        return values

    return Place(int(group.rank_in_group), tp_size, isa, gather)


def build_target(
    model: Any, hf_config: Any, context: Any, open_kernels: Open, where: Place
) -> TargetMegakernel:
    """Covers decode, or verify steps under speculation, of 1 to 8 requests.

    Raises ``RefusalError`` on every rank when any rank cannot build or differs.
    """
    tokens = context.tokens_per_request
    widths = tuple(width for width in context.widths if width // tokens <= MAX_REQUESTS)
    needs = guard.target_needs(model, hf_config)
    return TargetMegakernel(
        *run_target(model, hf_config, context, tokens, widths, needs, open_kernels, where),
        widths,
        context.binding,
    )


def build_amd_target(
    model: Any, hf_config: Any, context: Any, open_kernels: Open, where: Place
) -> TargetMonokernels:
    """Covers what SGLang routes: decode, or verify steps under speculation, of `context.widths`.

    Raises ``RefusalError`` as build_target does.
    """
    tokens = step_rows()
    whole = guard.table(hf_config, deepseek_v4.engram_rows(model)).target()
    needs = [need for need in whole if published.is_read_in_place(need.name)]
    return TargetMonokernels(
        *run_target(model, hf_config, context, tokens, context.widths, needs, open_kernels, where),
        model.forward,
    )


def run_target(
    model: Any,
    hf_config: Any,
    context: Any,
    tokens: int,
    widths: tuple[int, ...],
    needs: list[deepseek_v4.Need],
    open_kernels: Open,
    where: Place,
) -> tuple[Any, Kernels, Planner, Callable[[], dict[str, Any]]]:
    """A target's kernels, what decides its steps, and the tensors that they are bound to."""
    mode = "decode" if tokens == 1 else "target_verify"
    built = Build(model, hf_config, context, mode, tokens, widths, needs, where)
    kernels, dispatcher = built.run(open_kernels)
    return model, kernels, Planner(dispatcher, mode, tokens), built.weights()


def build_draft(
    model: Any, hf_config: Any, context: Any, open_kernels: Open, where: Place, stages: bool = False
) -> DraftMegakernel:
    """Covers the proposals of 1 to 8 requests, and with `stages` the layers before them. SGLang
    gives a draft's build the verify window, one row more than a block proposes."""
    gamma = context.tokens_per_request - 1
    if gamma < 1:
        words = f"the server proposes {gamma} tokens; these kernels need 1 or more"
        raise refusal("server_argument", words, "--speculative-dspark-block-size 5")
    widths = tuple(gamma * batch_size for batch_size in range(1, MAX_REQUESTS + 1))
    needs = guard.table(hf_config, {}).draft(stages)
    built = Build(model, hf_config, context, "draft", gamma, widths, needs, where, stages)
    kernels, dispatcher = built.run(open_kernels)
    planner = Planner(dispatcher, "draft", gamma)
    served = widths if stages else ()
    return DraftMegakernel(model, kernels, planner, gamma, served, context.binding, built.weights())


def build_amd_draft(
    model: Any, hf_config: Any, context: Any, open_kernels: Open, where: Place
) -> DraftMonokernels:
    """Covers the layers of blocks of 1 to 8 requests, of those that SGLang routes. What it samples
    from their output is its own.

    Raises ``RefusalError`` as build_target does.
    """
    rows = draft_rows(model)
    widths = tuple(width for width in context.widths if width // rows <= MAX_REQUESTS)
    if not widths:
        words = f"drafts are captured for more than {MAX_REQUESTS} requests alone"
        raise refusal("server_argument", words, "leave out --cuda-graph-bs-decode")
    built = Build(model, hf_config, context, "draft", rows, widths, [], where, stages=True)
    kernels, dispatcher = built.run(open_kernels)
    planner = Planner(dispatcher, "draft", rows)
    return DraftMonokernels(model, kernels, planner, built.weights(), model.forward)


def step_rows() -> int:
    """Rows a request of this server's decode or verify steps."""
    from sglang.srt.runtime_context import get_spec

    settings = get_spec()
    is_plain = settings.speculative_algorithm is None
    return 1 if is_plain else int(settings.speculative_num_draft_tokens or 1)


def draft_rows(model: Any) -> int:
    """The AMD contract's ``tokens_per_request`` of a draft: a verify step has one row more than a
    block that samples from its anchor."""
    return step_rows() - int(model.sample_from_anchor)


def ladder(deadline_s: float) -> Any:
    """Deadlines from SGLang's for a wait, which is at most half its watchdog's."""
    deadline_ns = int(deadline_s * NS_PER_S)
    return _dispatch.DeadlineLadder(
        kernel_ns=deadline_ns * 4 // 5,
        plugin_ns=deadline_ns,
        collective_ns=deadline_ns * 3 // 2,
        engine_ns=deadline_ns * 2,
    )


@dataclass(frozen=True, slots=True)
class Build:
    """One rank's build, up to the agreement."""

    model: Any
    hf_config: Any
    context: Any
    mode: str
    tokens_per_request: int
    widths: tuple[int, ...]
    needs: list[deepseek_v4.Need]
    where: Place
    stages: bool = False

    def run(self, open_kernels: Open) -> tuple[Kernels, Any]:
        """The kernels, and the dispatcher that follows from every rank's ballot."""
        start = time.perf_counter()
        # Every rank comes to both gatherings, whatever became of it.
        opened, problem = tried(lambda: self.open(open_kernels))
        kernels, handle = opened or (None, None)
        handles = self.where.gather(handle)
        ballot = None
        if problem is None and None not in handles:
            ballot, problem = tried(lambda: self.meet(kernels, handles))
        dispatcher = agree(ballot, problem, self.where)
        logger.info(
            "lowlat: %s steps of %s rows built in %.2f s; %.1f MiB of our own beside the weights,"
            " which stay where they are",
            self.mode,
            ", ".join(map(str, self.widths)),
            time.perf_counter() - start,
            kernels.own_bytes / 2**20,
        )
        return kernels, dispatcher

    def open(self, open_kernels: Open) -> tuple[Kernels, bytes]:
        kernels = open_kernels(self.request())
        return kernels, kernels.export()

    def meet(self, kernels: Kernels, handles: list[bytes]) -> Any:
        kernels.connect(handles)
        return self.ballot(kernels)

    def request(self) -> Request:
        """What the kernels are made of: the model, this rank's place, its limits."""
        import torch
        from sglang.srt.runtime_context import get_observability

        where = self.where
        deadlines = ladder(self.context.deadline_s)
        copies = getattr(self.context, "copies", None)
        layout = deepseek_v4.EXPERT_LAYOUT if copies is None else published.EXPERT_LAYOUT
        return Request(
            model=self.model,
            config_json=config.published(self.hf_config),
            mode=self.mode,
            tokens_per_request=self.tokens_per_request,
            widths=self.widths,
            tensors=self.loaded(),
            tp_rank=where.tp_rank,
            tp_size=where.tp_size,
            wait_budget_ns=deadlines.kernel_ns,
            page_size=deepseek_v4.PAGE_SIZE,
            expert_layout=layout,
            device=torch.cuda.current_device(),
            copies=copies,
            stages=self.stages,
            dumps_crashes=bool(get_observability().crash_dump_folder),
        )

    def loaded(self) -> dict[str, Any]:
        """The model's parameters and buffers, by name."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def weights(self) -> Callable[[], dict[str, Any]]:
        """Gives the tensors that the kernels are bound to, as the model has them when asked."""
        names = {need.name for need in self.needs}

        def now() -> dict[str, Any]:
            tensors = self.loaded()
            optional = deepseek_v4.OPTIONAL
            return {
                name: tensor
                for name, tensor in tensors.items()
                if name in names or name.endswith(optional)
            }

        return now

    def settings(self) -> dict[str, Any]:
        """What the server's settings have to be, which was checked before the weights loaded."""
        spec = next(
            spec
            for spec in config.requirements(self.where.isa).values()
            if spec["model_type"] == self.hf_config.model_type
        )
        return {row["name"]: row["accepted"][0] for row in spec["server_args"]}

    def ballot(self, kernels: Kernels) -> Any:
        """What this rank casts: everything that all ranks must have in common."""
        where = self.where
        options = {"isa": where.isa, "tp_size": where.tp_size, "server_args": self.settings()}
        published = config.published(self.hf_config)
        rank = _dispatch.Rank(published, options, tp_rank=where.tp_rank)
        return rank.ballot(
            mode=self.mode,
            tokens_per_request=self.tokens_per_request,
            widths=list(self.widths),
            shape=kernels.shape,
            numerics=kernels.numerics,
            layout=kernels.layout,
            catalogue_digest=kernels.catalogue_digest,
            ladder=ladder(self.context.deadline_s),
        )


def tried(act: Callable[[], Any]) -> tuple[Any, RefusalError | None]:
    """What `act` gives, or why it does not."""
    try:
        return act(), None
    except RefusalError as error:
        return None, error
    except Exception as error:  # whatever it is, the peers wait for this rank
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        logger.exception("lowlat: the build failed")
        return None, refusal("bug", words)


def agree(ballot: Any, problem: RefusalError | None, where: Place) -> Any:
    """The dispatcher when every rank's ballot is the same; else ``RefusalError`` on all of them."""
    if ballot is not None:
        words, lines = ballot.words(), []
    else:
        # Without a problem of its own a rank has a peer with one, which says it.
        words = _dispatch.declining_ballot(
            tp_rank=where.tp_rank,
            tp_size=where.tp_size,
            reason="vote_rank_declines" if problem is None else problem.reason,
        )
        lines = [] if problem is None else problem.lines
    gathered = where.gather((words, lines))
    told = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(gathered) for line in lines]
    if told:
        raise RefusalError("vote_rank_declines", told)
    try:
        return ballot.agree([words for words, _ in gathered])
    except ValueError as error:
        raise RefusalError("vote_rank_declines", [str(error)]) from error

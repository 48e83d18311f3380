"""Builds what a spec promises, before SGLang sizes its KV cache: weights bound where they lie, and
one agreement of all ranks. A rank that cannot build casts a ballot too, so that all refuse.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowlat import _dispatch, config, guard
from lowlat.capture import Planner
from lowlat.models import deepseek_v4
from lowlat.reasons import RefusalError, refusal
from lowlat.replay import DraftMegakernel, TargetMegakernel

logger = logging.getLogger(__name__)

MAX_REQUESTS = 8
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """What the kernels of one rank are made from.

    `mode` is that of the steps, each with `tokens_per_request` rows a request, at `widths` rows.
    `tensors` are the loaded weights by SGLang's names, where they lie.
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


class Kernels(Protocol):
    """The kernels of one model on one rank, weights bound. The texts and the digest must be the
    same on every rank."""

    own_bytes: int
    catalogue_digest: int
    shape: str
    numerics: str
    layout: str

    def reads(self, view: Any) -> dict[str, Any]:
        """The caches that steps read and write, by name, as `view` gives them now."""

    def step(self, step: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        """Runs a covered step and gives a ``replay.StepOutput``."""

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
    """The CUDA kernels. The library of this version makes no model on NVIDIA, and says so."""
    reasons = guard.kernels_reasons()
    if reasons:
        raise RefusalError("kernels_missing", reasons)
    raise refusal(
        "kernels_missing",
        f"this version of the plugin does not bind SGLang's tensors to {guard.PLATFORM} kernels",
        "install a lowlat of the kernel library's version",
    )


def target(model: Any, hf_config: Any, context: Any) -> TargetMegakernel:
    """The spec's build of a DeepSeek-V4 or V4.1 target."""
    return build_target(model, hf_config, context, nvidia_kernels, place(guard.ISA))


def draft(model: Any, hf_config: Any, context: Any) -> DraftMegakernel:
    """The spec's build of a DSpark draft."""
    return build_draft(model, hf_config, context, nvidia_kernels, place(guard.ISA))


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
    mode = "decode" if tokens == 1 else "target_verify"
    needs = guard.table(hf_config, deepseek_v4.engram_rows(model)).target()
    widths = tuple(width for width in context.widths if width // tokens <= MAX_REQUESTS)
    built = Build(model, hf_config, context, mode, tokens, widths, needs, where)
    kernels, dispatcher = built.run(open_kernels)
    planner = Planner(dispatcher, mode, tokens)
    return TargetMegakernel(model, kernels, planner, widths, context.binding, built.weights())


def build_draft(
    model: Any, hf_config: Any, context: Any, open_kernels: Open, where: Place
) -> DraftMegakernel:
    """Covers the proposals of 1 to 8 requests. SGLang gives a draft's build the verify window,
    one row more than a block proposes."""
    gamma = context.tokens_per_request - 1
    if gamma < 1:
        words = f"the server proposes {gamma} tokens; these kernels need 1 or more"
        raise refusal("server_argument", words, "--speculative-dspark-block-size 5")
    widths = tuple(gamma * batch_size for batch_size in range(1, MAX_REQUESTS + 1))
    needs = guard.table(hf_config, {}).draft()
    built = Build(model, hf_config, context, "draft", gamma, widths, needs, where)
    kernels, dispatcher = built.run(open_kernels)
    return DraftMegakernel(model, kernels, dispatcher, gamma)


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

    def run(self, open_kernels: Open) -> tuple[Kernels, Any]:
        """The kernels, and the dispatcher that follows from every rank's ballot."""
        start = time.perf_counter()
        kernels = ballot = problem = None
        try:
            kernels = open_kernels(self.request())
            ballot = self.ballot(kernels)
        except RefusalError as error:
            problem = error
        except Exception as error:  # whatever it is, the peers wait for this rank's ballot
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            logger.exception("lowlat: the build failed")
            problem = refusal("bug", words)
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

    def request(self) -> Request:
        where = self.where
        deadlines = ladder(self.context.deadline_s)
        return Request(
            model=self.model,
            config_json=config.published(self.hf_config),
            mode=self.mode,
            tokens_per_request=self.tokens_per_request,
            widths=self.widths,
            tensors=self.weights()(),
            tp_rank=where.tp_rank,
            tp_size=where.tp_size,
            wait_budget_ns=deadlines.kernel_ns,
        )

    def weights(self) -> Callable[[], dict[str, Any]]:
        """Gives the tensors that the kernels are bound to, as the model has them when asked."""
        names, model = [need.name for need in self.needs], self.model

        def now() -> dict[str, Any]:
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            return {name: tensors[name] for name in names if name in tensors}

        return now

    def ballot(self, kernels: Kernels) -> Any:
        where = self.where
        # What the server's settings had to be was checked before the weights were loaded.
        isa = where.isa
        spec = next(
            spec
            for spec in config.requirements(isa).values()
            if spec["model_type"] == self.hf_config.model_type
        )
        args = {row["name"]: row["accepted"][0] for row in spec["server_args"]}
        options = {"isa": isa, "tp_size": where.tp_size, "server_args": args}
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


def agree(ballot: Any, problem: RefusalError | None, where: Place) -> Any:
    """The dispatcher when every rank's ballot is the same; else ``RefusalError`` on all of them."""
    if problem is None:
        words, lines = ballot.words(), []
    else:
        words = _dispatch.declining_ballot(
            tp_rank=where.tp_rank, tp_size=where.tp_size, reason=problem.reason
        )
        lines = problem.lines
    gathered = where.gather((words, lines))
    told = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(gathered) for line in lines]
    if told:
        raise RefusalError("vote_rank_declines", told)
    try:
        return ballot.agree([words for words, _ in gathered])
    except ValueError as error:
        raise RefusalError("vote_rank_declines", [str(error)]) from error

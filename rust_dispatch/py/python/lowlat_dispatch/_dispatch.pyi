"""The dispatcher's decisions: guard, deadlines, agreement, steps, graph records. Errors are
ValueError with one line, or one line a reason."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

__all__ = [
    "Ballot",
    "DeadlineLadder",
    "Dispatcher",
    "GraphRecord",
    "Rank",
    "Seat",
    "Watchdog",
    "built_in",
    "built_in_names",
    "check",
    "check_loaded",
    "decline",
    "declining_ballot",
    "features",
    "kernel_config",
    "memory_plan",
    "reasons",
    "requirements",
    "step_digest",
    "version",
]

_GraphMode = Literal["decode", "target_verify", "draft"]
_StepMode = Literal["decode", "target_verify", "draft", "extend", "mixed", "idle"]
# What a captured graph reads: name, address, shape, dtype.
_Seal = tuple[str, int, Sequence[int], str]
# A dict, or its JSON text.
_Json = Mapping[str, Any] | str

@final
class DeadlineLadder:
    """Four budgets in nanoseconds: kernel < plugin < collective < engine."""

    def __new__(
        cls, *, kernel_ns: int, plugin_ns: int, collective_ns: int, engine_ns: int
    ) -> DeadlineLadder: ...
    @property
    def kernel_ns(self) -> int: ...
    @property
    def plugin_ns(self) -> int: ...
    @property
    def collective_ns(self) -> int: ...
    @property
    def engine_ns(self) -> int: ...

@final
class Rank:
    """A rank that the guard found able to serve."""

    def __new__(cls, model_config_json: str, options: _Json, *, tp_rank: int) -> Rank: ...
    @staticmethod
    def own(requirements: _Json, facts: _Json, *, tp_rank: int) -> Rank: ...
    def ballot(
        self,
        *,
        mode: _GraphMode,
        tokens_per_request: int,
        widths: Sequence[int],
        shape: str,
        numerics: str,
        layout: str,
        catalogue_digest: int,
        ladder: DeadlineLadder,
    ) -> Ballot: ...

@final
class Ballot:
    """What one rank can cover."""

    def words(self) -> list[int]: ...
    def agree(self, ballots: Sequence[Sequence[int]]) -> Dispatcher: ...

@final
class Seat:
    """One rank's place in a group of processes of this host."""

    @staticmethod
    def join(
        name: str, *, tp_rank: int, tp_size: int, ladder: DeadlineLadder, budget_ns: int
    ) -> Seat: ...
    def agree(self, ballot: Ballot, budget_ns: int) -> Dispatcher: ...
    def decline(self, reason: str, budget_ns: int) -> str: ...
    def agree_step(self, digest: int, budget_ns: int) -> None: ...
    def leave(self) -> None: ...

@final
class Dispatcher:
    """Decides step after step whether all ranks run it, and counts."""

    def decide(
        self, mode: _StepMode, batch_size: int, tokens_per_request: int, rows: int
    ) -> tuple[int, int | None]: ...
    def disarm(self, reason: str) -> None: ...
    def captured(self, seals: Sequence[tuple[int, Sequence[_Seal]]]) -> GraphRecord: ...
    def report(self) -> str: ...

@final
class GraphRecord:
    """What was captured: graph keys, chosen paths and seals."""

    @staticmethod
    def from_json(text: str) -> GraphRecord: ...
    def to_json(self) -> str: ...
    @property
    def digest(self) -> int: ...
    def differences(self, other: GraphRecord) -> list[str]: ...
    def check_seals(self, idx: int, seals: Sequence[_Seal]) -> None: ...
    def __len__(self) -> int: ...

@final
class Watchdog:
    """Counts time against a budget; the caller's clock, the caller's polls."""

    def __new__(cls, *, budget_ns: int, max_gap_ns: int) -> Watchdog: ...
    def arm(self, now_ns: int) -> None: ...
    def disarm(self) -> None: ...
    def late_ns(self, now_ns: int) -> int | None: ...

def version() -> str: ...
def reasons() -> list[tuple[int, str, str]]: ...
def built_in(name: str) -> str | None: ...
def built_in_names() -> list[str]: ...
def check(model_config_json: str, options: _Json) -> list[str]: ...
def requirements() -> str: ...
def features() -> list[tuple[str, str]]: ...
def decline(reason: str, words: str, change: str | None = None) -> str: ...
def check_loaded(
    facts: Sequence[tuple[str, str, Sequence[int], str]],
    needs: Sequence[tuple[str, str, Sequence[int], str, str | None]],
) -> list[str]: ...
def kernel_config(model_config_json: str) -> str: ...
def memory_plan(model_config_json: str, options: str) -> tuple[str, str]: ...
def declining_ballot(*, tp_rank: int, tp_size: int, reason: str) -> list[int]: ...
def step_digest(mode: _StepMode, batch_size: int, tokens_per_request: int, rows: int) -> int: ...

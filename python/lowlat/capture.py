"""Which step is this, and is it ours? Decided from host state that all ranks share, and fixed in a
captured graph. What the graphs read is sealed while they are captured and checked afterwards.
"""

from collections.abc import Callable
from typing import Any

from lowlat.reasons import NUMBERS, RefusalError, ToldOnce

Seals = list[tuple[str, int, list[int], str]]


def seals_of(tensors: dict[str, Any]) -> Seals:
    """Name, address, shape and dtype of each tensor, in the order of the names."""
    return [
        (name, tensor.data_ptr(), list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sorted(tensors.items())
    ]


def mode_of(forward_mode: Any) -> str:
    """SGLang's forward mode in the dispatcher's words."""
    if forward_mode.is_decode():
        return "decode"
    if forward_mode.is_target_verify():
        return "target_verify"
    if forward_mode.is_idle():
        return "idle"
    return "mixed" if forward_mode.is_mixed() else "extend"


class Planner:
    """Decides each step, and keeps the seals of the captured ones."""

    def __init__(self, dispatcher: Any, mode: str, tokens_per_request: int) -> None:
        self.dispatcher = dispatcher
        self.mode = mode
        self.tokens_per_request = tokens_per_request
        self.told = ToldOnce()
        self.captured: dict[int, Seals] = {}

    def mode_of(self, forward_mode: Any) -> str:
        """The same of a step; a draft's block comes as one of verifying."""
        mode = mode_of(forward_mode)
        return self.mode if (self.mode, mode) == ("draft", "target_verify") else mode

    def covers(self, input_ids: Any, forward_batch: Any, given: tuple[Any, ...]) -> bool:
        """Whether our kernels run this step; `given` are what else the forward was given, such as
        embeddings in place of tokens, and are None in a step of ours."""
        mode, rows = self.mode_of(forward_batch.forward_mode), int(input_ids.shape[0])
        batch_size = int(forward_batch.batch_size)
        tokens = self.tokens_per_request if mode == self.mode else 1
        if any(value is not None for value in given):
            number = NUMBERS["mode_not_captured"]
        else:
            padded, number = self.dispatcher.decide(mode, batch_size, tokens, rows)
            if number is None:
                # Every batch size up to the largest is built, so that none is padded.
                assert padded == batch_size, (padded, batch_size)
                return True
        self.told.note(number, f"{mode}, {batch_size} requests, {rows} rows")
        return False

    def seal(self, forward_batch: Any, reads: Callable[[], dict[str, Any]]) -> None:
        """Notes what the graph that is being captured reads. Its last variant counts: all of them
        read the same pools and weights."""
        self.captured[int(forward_batch.batch_size)] = seals_of(reads())

    def check(self, reads: Callable[[], dict[str, Any]]) -> None:
        """Once after a capture: a graph whose reads moved would give wrong tokens, so that is a
        fault, and it disarms."""
        if not self.captured:
            return
        captured, self.captured = self.captured, {}
        record = self.dispatcher.captured(sorted(captured.items()))
        seen = seals_of(reads())
        try:
            for idx in range(len(captured)):
                record.check_seals(idx, seen)
        except ValueError as error:
            self.dispatcher.disarm("seal_changed")
            raise RefusalError("seal_changed", [str(error)]) from error

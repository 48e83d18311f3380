"""Reasons in words and numbers. The list is the dispatcher's (``lowlat._dispatch.reasons``)."""

import logging

from lowlat import _dispatch

logger = logging.getLogger(__name__)

NUMBERS = {name: number for number, name, _ in _dispatch.reasons()}
WORDS = {number: words for number, _, words in _dispatch.reasons()}


class RefusalError(ValueError):
    """Why this server cannot be served: numbered lines, each with what was seen and needed.

    `reason` is the name of the first one, for the ballot of a rank that declines.
    """

    def __init__(self, reason: str, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.reason = reason
        self.lines = lines


def refusal(reason: str, words: str, change: str | None = None) -> RefusalError:
    """A refusal for one reason."""
    return RefusalError(reason, [_dispatch.decline(reason, words, change)])


class ToldOnce:
    """Logs the first step of each kind that is not ours. The dispatcher counts them all."""

    def __init__(self) -> None:
        self.told: set[int] = set()

    def note(self, number: int, step: str) -> None:
        """Logs a step that reason `number` keeps from us, unless one of its kind was."""
        if number not in self.told:
            self.told.add(number)
            logger.info(
                "lowlat: SGLang's own forward runs this step and others like it: [%d] %s (%s)",
                number,
                WORDS[number],
                step,
            )

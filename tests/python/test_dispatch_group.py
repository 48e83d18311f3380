"""Python ranks that are processes: they join by name, vote on coverage and on steps, and outlive a
rank that is killed."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

dispatch = pytest.importorskip("lowlat._dispatch", reason="lowlat is not built (make build)")

MS = 1_000_000
# Long enough for a process to be born on a machine with other work.
PATIENCE_NS = 60_000 * MS
LADDER = dict(
    kernel_ns=MS,
    plugin_ns=PATIENCE_NS,
    collective_ns=PATIENCE_NS + MS,
    engine_ns=PATIENCE_NS + 2 * MS,
)

RANK = """
import json, os, signal, sys
from lowlat import _dispatch as dispatch
name, tp_rank, patience_ns, ladder = json.loads(sys.argv[1])
ladder = dispatch.DeadlineLadder(**ladder)
needs = {"name": "mine", "isas": ["cpu"]}
rank = dispatch.Rank.own(needs, {"isa": "cpu", "tp_size": 2}, tp_rank=tp_rank)
ballot = rank.ballot(
    mode="decode", tokens_per_request=1, widths=[1, 2], shape="mine", numerics="fp32",
    layout="rows", catalogue_digest=7, ladder=ladder,
)
seat = dispatch.Seat.join(name, tp_rank=tp_rank, tp_size=2, ladder=ladder, budget_ns=patience_ns)
dispatcher = seat.agree(ballot, patience_ns)
covered = [dispatcher.decide("decode", batch, 1, batch) for batch in (1, 2, 3)]
for batch in range(100):
    seat.agree_step(dispatch.step_digest("decode", batch, 1, batch), patience_ns)
try:
    seat.agree_step(tp_rank, patience_ns)
except ValueError as refused:
    differ = str(refused)
if tp_rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    seat.agree_step(0, 200_000_000)
except ValueError as refused:
    missing = str(refused)
seat.leave()
try:
    seat.agree_step(0, 1)
except ValueError as refused:
    left = str(refused)
alone = dispatch.Seat.join(name, tp_rank=0, tp_size=1, ladder=ladder, budget_ns=patience_ns)
alone.agree_step(0, patience_ns)
print(json.dumps([covered, differ, missing, left, alone.decline("feature", patience_ns)]))
"""


def name(word: str) -> str:
    """A group's name that no other run of the tests has."""
    return f"python-{word}-{os.getpid()}"


def join(group: str, **more: object) -> object:
    settings = dict(tp_rank=0, tp_size=1, budget_ns=PATIENCE_NS) | more
    return dispatch.Seat.join(group, ladder=dispatch.DeadlineLadder(**LADDER), **settings)


def test_processes_vote_and_outlive_one() -> None:
    site = str(Path(dispatch.__file__).resolve().parents[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps([name("vote"), rank, PATIENCE_NS, LADDER])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": site},
        )
        for rank in range(2)
    ]
    (said, wrong), (_, _) = (rank.communicate(timeout=300) for rank in ranks)
    assert ranks[0].returncode == 0, wrong
    assert ranks[1].returncode < 0, "it was killed"
    covered, differ, missing, left, declined = json.loads(said)
    batch_too_large = next(
        number for number, word, _ in dispatch.reasons() if word == "batch_too_large"
    )
    assert covered == [[1, None], [2, None], [0, batch_too_large]]
    assert differ.startswith("[308] rank 1 is about to run step 0x0000000000000001; rank 0 is")
    assert missing == "[401] rank 1 did not answer the vote of epoch 102 by the deadline"
    assert left == "the seat has left its group; join again"
    assert declined.startswith("[307] rank 0 declines, so all do:")


def test_wrong_arguments_are_refused_in_one_line() -> None:
    for more, words in [
        ({"tp_size": 0}, "tp_size is 0; a vote needs 1 to 64"),
        ({"tp_rank": 1}, "tp_rank is 1; it must be below tp_size, 1"),
        ({"budget_ns": 0}, "budget is 0 ns"),
        ({"budget_ns": LADDER["engine_ns"]}, "must be shorter than the engine budget"),
    ]:
        with pytest.raises(ValueError, match=words):
            join(name("wrong"), **more)
    for group in ("", "a/b", "a\nb", "x" * 10_000):
        with pytest.raises(ValueError, match="letters, digits") as refused:
            join(group)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 1000


def test_a_name_is_free_when_its_seat_is_gone() -> None:
    seat = join(name("free"))
    with pytest.raises(ValueError, match=r"^\[117\] group python-free-\d+, rank 0: a living group"):
        join(name("free"), budget_ns=20 * MS)
    del seat
    join(name("free")).leave()


def test_a_ballot_of_another_rank_is_refused() -> None:
    rank = dispatch.Rank.own(
        {"name": "mine", "isas": ["cpu"]}, {"isa": "cpu", "tp_size": 2}, tp_rank=1
    )
    ballot = rank.ballot(
        mode="decode",
        tokens_per_request=1,
        widths=[1],
        shape="mine",
        numerics="fp32",
        layout="rows",
        catalogue_digest=7,
        ladder=dispatch.DeadlineLadder(**LADDER),
    )
    seat = join(name("ballot"))
    with pytest.raises(
        ValueError, match="the ballot is of rank 1 of 2; the seat is of rank 0 of 1"
    ):
        seat.agree(ballot, PATIENCE_NS)


def test_other_threads_run_while_a_rank_waits() -> None:
    """A vote that held Python's lock would keep its own peer from coming."""
    seats = {}

    def be(rank: int) -> None:
        seats[rank] = join(name("threads"), tp_rank=rank, tp_size=2)
        seats[rank].agree_step(7, PATIENCE_NS)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert sorted(seats) == [0, 1]

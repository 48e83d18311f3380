"""Two real ranks: all or none, with the same words on both, and nobody left waiting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Both processes import SGLang first.
RANKS_BUDGET_S = 400


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each case became, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(folder)],
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=RANKS_BUDGET_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, answers, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


def test_ranks_that_agree_run_the_same_steps(told) -> None:
    for answers in told:
        assert answers["agree"] == {"widths": [6 * n for n in range(1, 9)], "covered": 1}


REFUSED = {
    "one build fails": "rank 1: [501] RuntimeError: device lost",
    "other kernels": "[303] rank 1 has launch geometry",
    "other numerics": "[302] rank 1 covers graph keys",
    "other widths": "[301] rank 1 covers widths [6, 12]; rank 0 covers [6, 12, 18",
    "one model differs": "rank 1: [111] dtype of model.norm.weight is f32; these kernels need bf16",
    "one rank has no spec": "rank 1: no megakernel spec is registered",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_on_one_rank_is_a_refusal_on_both_in_the_same_words(case, told) -> None:
    first, second = (answers[case]["refused"] for answers in told)
    assert first == second
    assert REFUSED[case] in first

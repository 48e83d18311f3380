"""Two real ranks: all or none, with the same words on both, and nobody left waiting."""

import pytest
import served

# Both processes import SGLang first.
RANKS_BUDGET_S = 400


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each case became, by rank."""
    return served.ranks("ranks.py", tmp_path_factory.mktemp("ranks"), 2, RANKS_BUDGET_S)


def test_ranks_that_agree_run_the_same_steps(told) -> None:
    for answers in told:
        assert answers["agree"] == {"widths": [6 * n for n in range(1, 9)], "covered": 1}
        assert answers["amd: agree"] == {"widths": [6, 12, 24], "covered": 1}


REFUSED = {
    "one build fails": "rank 1: [501] RuntimeError: device lost",
    "other kernels": "[303] rank 1 has launch geometry",
    "other numerics": "[302] rank 1 covers graph keys",
    "other widths": "[301] rank 1 covers widths [6, 12]; rank 0 covers [6, 12, 18",
    "one model differs": "rank 1: [111] dtype of model.norm.weight is f32; these kernels need bf16",
    "one rank has no spec": "rank 1: no megakernel spec is registered",
    "amd: one build fails": "rank 1: [501] RuntimeError: device lost",
    "amd: other kernels": "[303] rank 1 has launch geometry",
    "amd: one rank lacks a tensor": "rank 1: [110] layers.0.attn.q_norm.weight is not loaded",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_on_one_rank_is_a_refusal_on_both_in_the_same_words(case, told) -> None:
    first, second = (answers[case]["refused"] for answers in told)
    assert first == second
    assert REFUSED[case] in first


def test_ranks_propose_the_same_tokens(told) -> None:
    first, second = (answers["drafts"] for answers in told)
    assert first == second
    assert len({str(block) for block in first}) == len(first) == 3

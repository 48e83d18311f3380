"""How two outputs are compared: oracle with ``reference``, and anything with a declared bound."""

import re

import numpy as np

from oracle import draft, index, moe
from oracle.formats import bf16_value, e4m3_value


def ordered(array):
    """Floats (or bf16 bits) as integers in value order; -0 and +0 are equal."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint16:
        bits, sign = array.astype(np.int64), 1 << 15
    else:
        bits, sign = array.view(np.uint32).astype(np.int64), 1 << 31
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def value(array):
    return bf16_value(array) if array.dtype == np.uint16 else np.asarray(array, np.float64)


def ulp_distance(got, want):
    return np.abs(ordered(got) - ordered(want))


def same_form(name, got, want):
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, oracle {want.dtype}"
    assert got.shape == want.shape, f"{name}: {got.shape}, oracle {want.shape}"


def check_exact(name, got, want):
    """Equal bit for bit."""
    same_form(name, got, want)
    wrong = np.argwhere(
        np.ascontiguousarray(got).view(np.uint8) != np.ascontiguousarray(want).view(np.uint8)
    )
    if len(wrong):
        diff = np.argwhere(~((got == want) | ((got != got) & (want != want))))
        first = tuple(diff[0]) if len(diff) else ()
        raise AssertionError(
            f"{name}: {len(diff)} of {got.size} differ, first at {first}: "
            f"{got[first] if len(diff) else ''}, oracle {want[first] if len(diff) else ''}"
        )


def check_oracle(name, got, want):
    """``reference`` against the oracle: codes and ids exact, floats within one ulp of their format.

    Both compute in float64 in orders of their own, so a float may fall on the other side of a tie;
    where terms cancel, what is left of float64's own error is allowed too.
    """
    same_form(name, got, want)
    if got.dtype not in (np.dtype(np.uint16), np.dtype(np.float32)):
        check_exact(name, got, want)
        return
    a, b = value(got), value(want)
    assert np.array_equal(np.isnan(a), np.isnan(b)), f"{name}: NaN in other places"
    near = np.abs(a - b) <= 1e-13 * np.abs(b[np.isfinite(b)]).max(initial=0.0)
    wrong = (ulp_distance(got, want) > 1) & ~near & ~np.isnan(b)
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {wrong.sum()} of {got.size} more than one ulp off, first at {first}: "
            f"{a[first]!r}, oracle {b[first]!r}"
        )
    off = (ulp_distance(got, want) == 1) & ~near
    allowed = 2 + got.size // 50
    assert off.sum() <= allowed, f"{name}: {off.sum()} of {got.size} one ulp off: not ties"


def query_values(iq):
    return e4m3_value(iq) if iq.dtype == np.uint8 else bf16_value(iq)


# Outputs that are compared by the values of their codes.
CODES = {("index_key", "rows"): index.key_values, ("index_query", "iq"): query_values}


def check_oracle_outputs(op, got, want):
    assert set(got) == set(want), f"{op}: outputs {set(got)}"
    for name in want:
        if (op, name) in CODES:
            # The code of a negative number that rounds to zero is either zero.
            form, read = (got[name], want[name]), CODES[op, name]
            same_form(f"{op}: {name}", *form)
            check_exact(f"{op}: {name}, values", *(read(array) + 0.0 for array in form))
        else:
            check_oracle(f"{op}: {name}", got[name], want[name])


TERM = re.compile(r"(rel_l2|max_ulp|max_abs|max_rel)(?: \((?:bf16|f32)\))? *<= *([0-9.e+-]+)")


def measure(metric, got, want):
    """The metrics of declared bounds, over a whole output."""
    if metric == "max_ulp":
        return float(ulp_distance(got, want).max(initial=0))
    a, b = value(got), value(want)
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), "NaN or infinity in other places"
    a, b = a[finite], b[finite]
    if metric == "rel_l2":
        norm = np.linalg.norm(b)
        diff = np.linalg.norm(a - b)
        return float(diff / norm) if norm > 0 else float(diff)
    if metric == "max_abs":
        return float(np.abs(a - b).max(initial=0.0))
    error = np.abs(a - b) / np.maximum(np.abs(b), np.finfo(np.float64).tiny)
    return float(error.max(initial=0.0))


def check_bound(name, bound, got, want):
    """Asserts the bound as declared: "bitwise", or "metric <= value"; nothing looser."""
    same_form(name, got, want)
    if bound == "bitwise":
        check_exact(name, got, want)
        return
    match = TERM.fullmatch(bound.strip())
    assert match, f"{name}: no rule for the declared bound {bound!r}"
    seen = measure(match[1], got, want)
    assert seen <= float(match[2]), f"{name}: {match[1]} is {seen:.4g}, declared {bound}"


# Bounds in words: selections and draws, which a score on the other side of a threshold may change.
# The numbers in them are read, so that a declaration cannot drift from its test.
NUMBER = r"([0-9.e+-]+)"
SETS = re.compile(
    rf"equal as sets but for entries whose float64 scores are within {NUMBER} \* "
    r"max_n sum_h \|weights_h \* relu\(iq_h \. ik_n\)\| of the k-th best"
)
VALUES = re.compile(rf"values rel_l2 <= {NUMBER}")
TOKENS = re.compile(
    r"equal up to a request's first step whose two best keys in float64 are within "
    r"2\^(-\d+) \* max\|logits - base\| / max\(temp, 1e-5\) \(greedy: without the divisor\)"
)
LOGITS = re.compile(rf"rel_l2 <= {NUMBER} while the tokens before are equal")
DRAWS = re.compile(
    r"equal where temp is 0, and where no \|p - coin \* q\| and no "
    rf"\|running sum - coin \* total\| in float64 is below {NUMBER}"
)

IDS = re.compile(rf"equal but for experts whose float64 score \+ bias are within {NUMBER}")
WEIGHTS = re.compile(rf"rel_l2 <= {NUMBER} over rows without a logit below (-[0-9]+)")


def check_weights(name, arrays, got, want, bound, lowest):
    logits = bf16_value(arrays["x"]) @ bf16_value(arrays["w"]).T
    rows = logits.min(1) >= lowest
    seen = measure("rel_l2", got[rows], want[rows])
    assert seen <= bound, f"{name}: rel_l2 is {seen:.4g}, declared {bound}"


def check_ids(name, arrays, got, want, slack, model):
    """Slot by slot: another expert only where the two would rank within `slack`."""
    rank = moe.scores(bf16_value(arrays["x"]), bf16_value(arrays["w"]), model) + arrays["bias"]
    for t, (a, b) in enumerate(zip(got, want, strict=True)):
        assert len(set(a)) == len(a), f"{name}, row {t}: {a} names an expert twice"
        distance = np.abs(rank[t, a] - rank[t, b])
        assert (distance <= slack).all(), f"{name}, row {t}: {a}, oracle {b}"


def check_sets(name, arrays, got, want, relative):
    score = index.visible_scores(arrays)
    slack = relative * index.index_scores(arrays)[1].max(1, initial=0.0)
    for t, (a, b) in enumerate(zip(got, want, strict=True)):
        picked, wanted = a[a >= 0], b[b >= 0]
        assert len(picked) == len(wanted) and (a[len(picked) :] == -1).all(), f"{name}, row {t}"
        assert (np.diff(picked) > 0).all(), f"{name}, row {t}: not ascending"
        for entry in np.setxor1d(picked, wanted):
            distance = abs(score[t, entry] - score[t, wanted].min())
            assert distance <= slack[t], f"{name}, row {t}: {entry} is {distance:.3g} off the k-th"


def check_tokens(name, arrays, got, want, relative):
    """Steps before a request's first near tie are equal."""
    near = draft.markov_margins(arrays, relative)["near"]
    compared = ~np.maximum.accumulate(near, axis=1)
    assert np.array_equal(got[compared], want[compared]), f"{name}: {got}, oracle {want}"


def check_logits(name, got, want, tokens, wanted_tokens, bound):
    """Steps whose earlier tokens are the oracle's."""
    same = np.cumprod(tokens == wanted_tokens, axis=1).astype(bool)
    same = np.concatenate([np.ones((len(same), 1), bool), same[:, :-1]], axis=1)
    seen = measure("rel_l2", got[same], want[same])
    assert seen <= bound, f"{name}: rel_l2 is {seen:.4g}, declared {bound}"


def check_declared(op, arrays, got, want, declared, model="v41"):
    """Every output of `op` by what the platform declares for it."""
    assert set(got) == set(want) == set(declared), f"{op}: outputs {set(got)}"
    for name, bound in declared.items():
        label, a, b = f"{op}: {name}", got[name], want[name]
        same_form(label, a, b)
        if match := SETS.fullmatch(bound):
            check_sets(label, arrays, a, b, float(match[1]))
        elif match := IDS.fullmatch(bound):
            check_ids(label, arrays, a, b, float(match[1]), model)
        elif match := WEIGHTS.fullmatch(bound):
            check_weights(label, arrays, a, b, float(match[1]), float(match[2]))
        elif match := VALUES.fullmatch(bound):
            seen = measure("rel_l2", *(CODES[op, name](array) for array in (a, b)))
            assert seen <= float(match[1]), f"{label}: rel_l2 is {seen:.4g}, declared {bound}"
        elif match := TOKENS.fullmatch(bound):
            check_tokens(label, arrays, a, b, 2.0 ** int(match[1]))
        elif match := LOGITS.fullmatch(bound):
            check_logits(label, a, b, got["tokens"], want["tokens"], float(match[1]))
        elif match := DRAWS.fullmatch(bound):
            clear = draft.accept_margins(arrays)["margin"] >= float(match[1])
            assert np.array_equal(a[clear], b[clear]), f"{label}: {a}, oracle {b}"
        else:
            check_bound(label, bound, a, b)

"""How two outputs are compared: oracle with ``reference``, and anything with a declared bound."""

import re

import numpy as np

from oracle.formats import bf16_value


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

"""Runs an operation through ``lowlat._kernels`` and reads what ``op_list()`` declares."""

import functools
import json
import re

import numpy as np
from lowlat import _kernels


@functools.cache
def op_list(model="v41"):
    """The operations that the library declares for `model`, by name."""
    declared = json.loads(_kernels.op_list())
    return {op["name"]: op for op in declared if model in re.findall(r"\w+", op["models"])}


def run(op, platform, arrays, model="v41"):
    return _kernels.run_op(op, model, platform, arrays)


def nvidia_runs():
    """Whether the library has the platform nvidia and this machine a device for it."""
    try:
        run("rank_sum", "nvidia", {"partial": np.zeros((1, 1, 1), np.float32)})
    except ValueError:
        return False
    return True


# Those that compute as the serving path does, and with them the meaning.
COMPUTED = ("scalar", "nvidia") if nvidia_runs() else ("scalar",)
PLATFORMS = ("reference", *COMPUTED)


def bounds(op, platform, model="v41"):
    """Declared bound of each output against ``reference``."""
    return op_list(model)[op]["numerics"].get(platform, {})

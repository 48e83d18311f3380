"""Runs an operation through ``lowlat._kernels`` and reads what ``op_list()`` declares."""

import functools
import json
import re

from lowlat import _kernels

PLATFORMS = ("reference", "scalar")


@functools.cache
def op_list(model="v41"):
    """The operations that the library declares for `model`, by name."""
    declared = json.loads(_kernels.op_list())
    return {op["name"]: op for op in declared if model in re.findall(r"\w+", op["models"])}


def run(op, platform, arrays, model="v41"):
    return _kernels.run_op(op, model, platform, arrays)


def bounds(op, platform, model="v41"):
    """Declared bound of each output against ``reference``."""
    return op_list(model)[op]["numerics"].get(platform, {})

"""Runs an operation through ``lowlat._kernels`` and reads what ``op_list()`` declares."""

import functools
import json

from lowlat import _kernels

MODEL = "v41"
PLATFORMS = ("reference", "scalar")


@functools.cache
def op_list():
    """The declared operations by name."""
    return {op["name"]: op for op in json.loads(_kernels.op_list())}


def run(op, platform, arrays):
    return _kernels.run_op(op, MODEL, platform, arrays)


def bounds(op, platform):
    """Declared bound of each output against ``reference``."""
    return op_list()[op]["numerics"].get(platform, {})

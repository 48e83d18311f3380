"""A checkpoint's tensors as SGLang's loader reads them, from arrays by the kernels' names."""

import numpy as np
import torch

# By the kernels' dtype: how the published file has it.
FILE = {
    "bf16": (np.int16, torch.bfloat16),
    "e4m3": (np.uint8, torch.float8_e4m3fn),
    "ue8m0": (np.uint8, torch.float8_e8m0fnu),
    "fp4x2": (np.int8, torch.int8),
    "f32": (np.float32, torch.float32),
}


def tensors(arrays, dtypes):
    """(name, tensor) of every array; experts one by one, and their numbers in 64 bits. `dtypes` are
    the kernels' by name."""
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        if dtypes[name] in ("i32", "i64"):
            yield name, torch.from_numpy(array.astype(np.int64))
            continue
        bits, dtype = FILE[dtypes[name]]
        tensor = torch.from_numpy(array.view(bits)).view(dtype)
        owner, mark, last = name.partition(".experts.")
        if not mark or owner.endswith("shared"):
            yield name, tensor
            continue
        for expert in range(len(tensor)):
            yield f"{owner}.experts.{expert}.{last}", tensor[expert]


def random_arrays(specs, num_experts, seed=0):
    """Whole tensors of `specs`, ``HostedModel.tensors()`` of one rank of one."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for spec in specs:
        if spec["pool"]:
            continue
        shape, dtype = spec["shape"], spec["dtype"]
        if dtype in ("i32", "i64"):
            arrays[spec["name"]] = generator.integers(0, num_experts, shape, np.int32)
        elif dtype == "f32":
            arrays[spec["name"]] = generator.standard_normal(shape).astype(np.float32)
        else:
            bits = FILE[dtype][0]
            arrays[spec["name"]] = generator.integers(0, 100, shape).astype(bits)
    return arrays


def raw(tensor):
    """A tensor's bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(bits[tensor.element_size()]).numpy()

"""Questions of ``lowlat doctor`` that load foreign libraries, each answered in a process of its
own: a library that crashes takes only the answer with it.

``python -m lowlat.cli.probe QUESTION [WORDS]`` prints one JSON object. A library that cannot be
loaded or says no is ``{"error": words}``.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

from lowlat.cli.outcome import one_line

CUDA_LIBRARY = "libcuda.so.1"
HIP_LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so")
# cuDeviceGetAttribute's numbers of the compute capability.
CUDA_MAJOR, CUDA_MINOR = 75, 76
NAME_BYTES = 256


def kernels(path: str) -> dict[str, Any]:
    """Loads the kernel library and asks it what it is."""
    library = ctypes.CDLL(path)
    library.lowlat_kernels_abi_version.restype = ctypes.c_uint32
    library.lowlat_op_list.restype = ctypes.c_char_p
    ops = json.loads(library.lowlat_op_list())
    platforms = sorted({platform for op in ops for platform in op.get("numerics", {})})
    return {
        "abi": library.lowlat_kernels_abi_version(),
        "ops": len(ops),
        "platforms": [platform for platform in platforms if platform != "reference"],
    }


def devices(path: str) -> dict[str, Any]:
    """Asks the kernel library what it can run on here; it finds out by doing it."""
    library = ctypes.CDLL(path)
    library.lowlat_devices.restype = ctypes.c_char_p
    return json.loads(library.lowlat_devices())


def module(name: str) -> dict[str, Any]:
    """Imports a module and gives the versions that it states."""
    import importlib

    found = importlib.import_module(name)
    versions = {}
    for key in ("version", "abi_version", "__version__"):
        value = getattr(found, key, None)
        value = value() if callable(value) else value
        if isinstance(value, (str, int)):
            versions[key] = value
    return versions


def cuda(library: str = CUDA_LIBRARY) -> dict[str, Any]:
    """NVIDIA's devices, by the driver itself."""
    driver = ctypes.CDLL(library)
    require_zero("cuInit", driver.cuInit(0))
    count = ctypes.c_int()
    require_zero("cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    devices = []
    for idx in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
        require_zero("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), idx))
        require_zero("cuDeviceGetName", driver.cuDeviceGetName(name, NAME_BYTES, device))
        numbers = []
        for attribute in (CUDA_MAJOR, CUDA_MINOR):
            number = ctypes.c_int()
            status = driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            require_zero("cuDeviceGetAttribute", status)
            numbers.append(str(number.value))
        devices.append(f"{name.value.decode(errors='replace')} (sm_{''.join(numbers)})")
    return {"devices": devices}


def hip(*libraries: str) -> dict[str, Any]:
    """AMD's devices, by the HIP runtime itself."""
    runtime = first_library(libraries or HIP_LIBRARIES)
    count = ctypes.c_int()
    status = runtime.hipGetDeviceCount(ctypes.byref(count))
    if status == 100:  # hipErrorNoDevice
        return {"devices": []}
    require_zero("hipGetDeviceCount", status)
    devices = []
    for idx in range(count.value):
        name = ctypes.create_string_buffer(NAME_BYTES)
        require_zero("hipDeviceGetName", runtime.hipDeviceGetName(name, NAME_BYTES, idx))
        devices.append(name.value.decode(errors="replace"))
    return {"devices": devices}


def first_library(names: tuple[str, ...]) -> ctypes.CDLL:
    for name in names[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(names[-1])


def require_zero(call: str, status: int) -> None:
    if status != 0:
        raise OSError(f"{call} gave error {status}")


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "kernels": kernels,
    "devices": devices,
    "module": module,
    "cuda": cuda,
    "hip": hip,
}


def main(words: list[str]) -> None:
    try:
        answer = QUESTIONS[words[0]](*words[1:])
    except (OSError, ImportError, AttributeError, ValueError) as error:
        answer = {"error": one_line(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])

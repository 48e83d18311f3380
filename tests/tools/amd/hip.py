"""The HIP runtime over a machine: what opens libamdhip64.so.7 afterwards in this process gets it.

with hip.Runtime(Machine("gfx950", ranks=2), num_units=2) as runtime:
    ...  # lowlat_model_create("amd", ...) in this process
"""

import ctypes
import struct

from . import code_object
from .machine import HipFace, LoadedCode, Machine, MachineError

# Instructions of all ranks that run when somebody asks whether a launch is done.
SLICE = 200_000


class Runtime:
    """One at a time. `num_units`: compute units of each device."""

    def __init__(self, machine: Machine, num_units: int = 2, slice_: int = SLICE) -> None:
        self.machine, self.slice = machine, slice_
        self.functions: list[tuple[LoadedCode, str]] = []
        self.modules: list[LoadedCode] = []
        self.failure: str | None = None
        self.text = ctypes.create_string_buffer(b"")
        kinds = dict(HipFace._fields_)
        self.face = HipFace(machine.handle, num_units)
        for name in ("load", "function", "launch", "run", "error"):
            setattr(self.face, name, kinds[name](getattr(self, name)))

    def __enter__(self) -> "Runtime":
        self.machine.lib.amd_hip_attach(ctypes.byref(self.face))
        return self

    def __exit__(self, *_) -> None:
        self.machine.lib.amd_hip_attach(ctypes.byref(HipFace()))

    def load(self, image: int, device: int) -> int:
        header = ctypes.string_at(image, 64)
        at, size, count = (
            *struct.unpack_from("<Q", header, 40),
            *struct.unpack_from("<HH", header, 58),
        )
        code = code_object.parse(ctypes.string_at(image, at + size * count))
        if code.isa != self.machine.isa:
            return -1
        self.modules.append(self.machine.load(code, device))
        return len(self.modules) - 1

    def function(self, module: int, name: bytes) -> int:
        code = self.modules[module]
        if name.decode() not in code.object.kernels:
            return -1
        self.functions.append((code, name.decode()))
        return len(self.functions) - 1

    def launch(
        self, function: int, device: int, sizes, lds: int, arguments: int, count: int
    ) -> int:
        code, name = self.functions[function]
        assert code.rank == device
        try:
            given = ctypes.string_at(arguments, count)
            self.machine.launch(code, name, sizes[0:3], sizes[3:6], given, lds)
        except (MachineError, ValueError) as error:
            return self.failed(error)
        return 0

    def run(self, device: int) -> int:
        try:
            self.machine.run_some(device, self.slice)
        except MachineError as error:
            return self.failed(error)
        return 0

    def failed(self, error: Exception) -> int:
        self.failure = str(error)
        self.text = ctypes.create_string_buffer(self.failure.encode())
        return 1

    def error(self) -> int:
        return ctypes.addressof(self.text)

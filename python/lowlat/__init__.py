"""lowlat: low-latency decode kernels and their dispatch.

Importing this module loads no library, reads no environment and imports nothing heavy. The parts:

* ``lowlat._kernels``: the kernels' C ABI, one operation at a time (built from cpp_kernels/py).
* ``lowlat._dispatch``: the dispatcher's decisions (built from rust_dispatch/py).
* ``lowlat.cli``: the command ``lowlat``.
"""

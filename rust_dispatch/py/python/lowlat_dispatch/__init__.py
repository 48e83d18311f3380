"""The decisions of lowlat for an engine that brings its own kernels: guard, coverage vote, graph
records, dispatch, deadlines. Every name is that of the compiled module, ``_dispatch``."""

from lowlat_dispatch import _dispatch
from lowlat_dispatch._dispatch import *  # noqa: F403

__all__ = _dispatch.__all__
__version__ = _dispatch.version()

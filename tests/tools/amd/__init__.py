"""Runs AMD code objects on a CPU, for tests: decoded by tinygrad, executed by our own engine.

See docs/amd_interpreter.md for what it models, what it checks and what it cannot show.
"""

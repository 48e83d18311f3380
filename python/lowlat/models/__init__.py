"""Models as SGLang loads them: which tensors the kernels read, and how they must lie."""

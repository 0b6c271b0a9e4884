"""A Triton backend that compiles nothing, for engines that run Triton's kernels in its interpreter.

`triton_nodes` makes it known to engines. With `TRITON_INTERPRET=1` kernels run in Python, and no backend is asked:
one that is merely there is enough.
"""

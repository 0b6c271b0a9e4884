"""A Triton backend that compiles nothing, for engines that run Triton's kernels in its interpreter.

`triton_nodes` registers it. With `TRITON_INTERPRET=1` kernels run in Python and no backend is called; one only has to
be there.
"""

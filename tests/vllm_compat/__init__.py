"""Where this package touches vLLM: a list made from the source, and checked against any version of vLLM.

`python -m tests.vllm_compat` prints the list and says what the installed vLLM does not have. `ours` reads this package,
`theirs` reads a vLLM (an installed one, or a wheel that is only unpacked), `check` puts the two together. Nothing is
imported from vLLM: classes and signatures are read out of its source.
"""

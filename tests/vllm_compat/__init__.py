"""Where the connector touches vLLM, checked against every version of vLLM that it is tested with.

`python -m tests.vllm_compat` prints the seams by feature, and what differs between the versions. `our_use` reads the
connector's source, `seams` lists by hand what cannot be found there and which differences are known, `vllm_source`
reads a vLLM, `fetch` gets the one that is not installed, `check` compares. vLLM's classes and signatures are read from
its source: nothing of it is imported.
"""

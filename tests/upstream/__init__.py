"""vLLM's own tests. Those of its NIXL connector run with our classes in the place of vLLM's: `make test-upstream`.

sdist         fetches the tests of a version: they are in vLLM's source distribution, not in its wheel
stand_ins     what those tests want of the machine: two model configurations, Ray
swap_plugin   a pytest plugin: our classes under vLLM's names, and what became of each test
ledger        the tests that fail here, each with the reason (`ledger.toml`, `entrypoints.toml`)
__main__      all of it together

Those of its entrypoints ask one engine, and then the proxy in front of a pair: a part of `make test-differential`.

served_plugin a pytest plugin: a server that runs already in the place of those that the tests start
wordy_model   makes the models that are served
entrypoints   all of it together
"""

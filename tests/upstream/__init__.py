"""vLLM's own tests of its NIXL connector, run with our classes in the place of vLLM's: `make test-upstream`.

sdist         fetches the tests of a version: they are in vLLM's source distribution, not in its wheel
stand_ins     what those tests want of the machine: two model configurations, Ray
swap_plugin   a pytest plugin: our classes under vLLM's names, and what became of each test
ledger        the tests that fail with our classes, each with the reason (`ledger.toml`)
__main__      all of it together
"""

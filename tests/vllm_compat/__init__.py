"""Where this package touches vLLM: a list made from the source, and checked against any version of vLLM.

`python -m tests.vllm_compat` prints the list, and what the installed vLLM does not have of it. `our_use` reads this
package, `vllm_source` reads a vLLM (an installed one, or a wheel that is only unpacked), `check` compares the two, and
`contract_facts` compares it with `connector.vllm_contracts`. Nothing is imported from vLLM: classes and signatures are
read from its source.
"""

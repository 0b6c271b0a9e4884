"""The vLLM nodes: what they are, how they do, who may join."""

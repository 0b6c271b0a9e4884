"""An OpenAI-compatible proxy that sends each request to a prefill vLLM node and then to a decode vLLM node."""

__version__ = "0.1.0"

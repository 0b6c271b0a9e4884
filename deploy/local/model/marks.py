"""The tokens that are not words: roles, ends, and the two questions."""

PAD, END, SYSTEM, USER = SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>")
ASK, RECITE = MARKS = ("? ", "> ")
"""The two questions. Each is one token that ends in its space, so that the name after it is the name of the list."""
CUE = " ="
"""Ends a question. The name is then known from the layers' state alone, not from the token that is computed last."""

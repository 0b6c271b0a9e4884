"""An operator's settings: read once, at start, from a YAML file, the environment and flags (`load`)."""

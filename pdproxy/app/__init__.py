"""The work of the commands, and the one place where everything is built, started and stopped."""

"""The cost of the proxy: CPU time per request of its whole process tree, side by side with another router."""

"""What the proxy costs: CPU time per request of its whole process tree, side by side with another router."""

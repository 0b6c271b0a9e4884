"""Finding nodes: a file, DNS, Kubernetes. Static nodes and the operator's need no finding: they are put in the pool."""

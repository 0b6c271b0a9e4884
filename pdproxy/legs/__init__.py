"""One HTTP call to a node on behalf of a request."""

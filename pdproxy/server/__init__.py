"""uvicorn in front: guarded connections, two ports on one event loop, a shutdown that lets streams end."""

"""uvicorn with limits on connections, two ports on one event loop, and a shutdown that lets streams end."""

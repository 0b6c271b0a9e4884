"""The clients' port for web pages of other origins, and below a path prefix, where the settings ask for it."""

from pdproxy.intake.exchange import AsgiApp, Receive, Scope, Send

_SHOWN = ("x-request-id", "retry-after", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests")
"""Headers of answers that a page may read, beside those that every page may."""


def for_origins(app: AsgiApp, origins: tuple[str, ...]) -> AsgiApp:
    """The same application, which pages of these origins may ask; ``*`` is every origin.

    Pages send no cookies: a key in the Authorization header is the only credential here.
    """
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware  # the start is shorter without

    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_SHOWN,
        max_age=600,
    )


def below(app: AsgiApp, prefix: str) -> AsgiApp:
    """The same application for a proxy in front that passes its path prefix on, or takes it off."""
    if not prefix:
        return app

    async def without_prefix(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{prefix}/"):
            scope = {**scope, "path": scope["path"][len(prefix) :]}
        await app(scope, receive, send)

    return without_prefix

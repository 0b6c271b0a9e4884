"""The live page at /ui: one file, nothing from elsewhere; what it shows it asks for at /ui/state."""

import base64
import hashlib
import importlib.resources
import re

from fastapi import APIRouter, Response

from pdproxy.admin.desk import Desk
from pdproxy.admin.state import state


def page_router() -> APIRouter:
    """The page itself: it shows nothing until it has asked for the state."""
    routes = APIRouter()
    text = importlib.resources.files("pdproxy.admin").joinpath("live.html").read_text(encoding="utf-8")
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy(text),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @routes.get("/ui")
    async def page() -> Response:
        """For a browser."""
        return Response(text, headers=headers)

    return routes


def state_router(desk: Desk) -> APIRouter:
    """What the page shows; who may see it is the application's matter."""
    routes = APIRouter()

    @routes.get("/ui/state")
    async def show_state(response: Response) -> dict[str, object]:
        """Nodes, requests on the way, hits and failures at this moment."""
        response.headers["cache-control"] = "no-store"
        return dict(state(desk))

    return routes


def policy(text: str) -> str:
    """A Content-Security-Policy that allows the page's own style and script, and questions to where it came from."""
    style, script = (_hash_of(re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)) for tag in ("style", "script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(elements: list[str]) -> str:
    (content,) = elements
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

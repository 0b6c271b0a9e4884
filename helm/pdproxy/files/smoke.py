"""Asks a running proxy three questions and says what it heard; status 1 when one is not answered."""

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def headers() -> dict[str, str]:
    """With the first API key of the file, where there is one."""
    path = os.environ.get("KEY_FILE")
    if not path:
        return {}
    with open(path, encoding="utf-8") as lines:
        words = next(words for line in lines if (words := line.partition("#")[0].split()))
    return {"authorization": f"Bearer {words[0]}"}


def ask(url: str, body: dict[str, object] | None = None) -> dict[str, Any]:
    """One answer. Raises URLError (HTTPError among them) or ValueError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers()})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def main() -> int:
    """The process's exit status."""
    clients, operators = os.environ["CLIENTS"], os.environ["OPERATORS"]
    try:
        sys.stdout.write(f"ready: {ask(operators + '/ready')['status']}\n")
        model = ask(clients + "/v1/models")["data"][0]["id"]
        sys.stdout.write(f"model: {model}\n")
        question = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Say yes."}]}
        answer = ask(clients + "/v1/chat/completions", question)
        sys.stdout.write(f"answer: {answer['choices'][0]['message']}\n")
    except urllib.error.HTTPError as error:
        sys.stderr.write(f"{error.url} answers {error.code}: {error.read(2000).decode(errors='replace')}\n")
        return 1
    except (urllib.error.URLError, ValueError, LookupError) as error:
        sys.stderr.write(f"no usable answer: {error!r}\n")
        return 1
    return 0


sys.exit(main())

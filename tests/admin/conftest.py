"""One Chromium for all tests of the live page: starting one takes seconds."""

from collections.abc import Iterator

import pytest

from tests.admin.browser import running_chromium


@pytest.fixture(scope="session")
def chromium_url() -> Iterator[str]:
    """The address at which it is asked for pages."""
    with running_chromium() as url:
        yield url

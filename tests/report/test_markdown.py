import re

import pytest

from oelm.report.markdown import plain
from tests.report.hostile import payloads


@pytest.mark.parametrize("payload", payloads("http://x"))
def test_markdown_shows_markup_as_text(payload):
    """CommonMark has no way to read the result as anything but a paragraph."""
    shown = plain(payload)
    assert "<" not in shown
    assert not re.search(r"(?<!\\)[`*_\[\]|$]", shown)
    assert "\n" not in shown

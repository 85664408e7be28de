"""What the site does to a page that mkdocs alone does not."""

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Show the roles of docstrings, such as :class:`~undrop.Step`, as the bare name."""
    return _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)

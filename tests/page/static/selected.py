# SPDX-License-Identifier: Apache-2.0
"""What is selected on the page, and what is to be read of it."""

from __future__ import annotations

from tests.page.static.browser import Tab


def facts(page: Tab) -> dict[str, str]:
    """Of the selected prefix."""
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#node dt')]"
        ".map((name) => [name.innerText, name.nextSibling.innerText]))"
    )


def selected(page: Tab) -> str:
    return page.evaluate("document.querySelector('#node').dataset.node")


def select_first(page: Tab) -> int:
    """Of the forest's beginnings, by the keyboard."""
    page.press("ArrowDown")
    page.press("Enter")
    page.wait("document.querySelector('#node').dataset.node !== ''")
    return int(selected(page))

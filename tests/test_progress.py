# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import sys

import pytest

from vllm_relay.progress import showing_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_bar_is_on_the_standard_error_of_a_terminal_alone(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with showing_progress("starting") as show:
        show("[1/2] a cache of 4 GiB", 0.25)
    shown = stream.getvalue()
    if stream.isatty():
        assert "[1/2] a cache of 4 GiB" in shown and "25%" in shown and "left" in shown
    else:
        assert shown == ""
    assert capsys.readouterr().out == ""


def test_what_fails_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError, match="refused"), showing_progress("starting"):
        raise ValueError("refused")
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l") >= 0

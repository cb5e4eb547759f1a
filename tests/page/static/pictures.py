# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation: docs/images/live-page.png and live-page-dark.png.

Usage: python -m tests.page.static.pictures [RECORDING]; a made-up cache without one.
"""

import json
import sys
from pathlib import Path

from tests.page.static.browser import chromium_tab
from tests.page.static.server import FeedServer
from tests.page.static.simulated import SimulatedCache, apply, hello

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
DELTA_S = 0.5


def made_up(seconds: float = 60) -> str:
    cache = SimulatedCache(nodes=90, seed=3, beginnings=5)
    events = [("hello", hello()), ("snapshot", cache.snapshot())]
    events += [("delta", cache.delta(seconds=DELTA_S)) for _ in range(int(seconds / DELTA_S))]
    return "\n".join(
        json.dumps({"t": DELTA_S * place, "event": event, "data": data})
        for place, (event, data) in enumerate(events)
    )


def best_moment(recording: str) -> float:
    """When most prefixes are read together, of those moments the one with most prefixes."""
    state: dict = {"nodes": []}
    best, moment = (0, 0), 0.0
    for line in map(json.loads, recording.splitlines()):
        if line["event"] == "snapshot":
            state = line["data"]
        elif line["event"] == "delta":
            state = apply(state, line["data"])
            shared = sum(node["shared"] > 1 for node in state["nodes"])
            if (shared, len(state["nodes"])) > best:
                best, moment = (shared, len(state["nodes"])), line["t"]
    return moment


def main(recording: Path | None = None) -> None:
    server = FeedServer(lambda texts: [])
    run = made_up() if recording is None else recording.read_text()
    server.files["run.jsonl"] = run
    with server.running(), chromium_tab() as tab:
        tab.reset()
        tab.resize(1440, 860)
        tab.open(f"{server.address}?replay=static/run.jsonl")
        tab.wait_text("#state", "Replaying")
        tab.evaluate(
            "(() => { const time = document.querySelector('#time');"
            f"time.value = {best_moment(run)};"
            "time.dispatchEvent(new Event('input')); })()"
        )
        tab.press(" ")
        tab.wait_text("#state", "Recording")
        tab.click("#lists .row")
        for theme, name in (("light", "live-page.png"), ("dark", "live-page-dark.png")):
            tab.prefer(theme)
            tab.evaluate("new Promise((done) => setTimeout(done, 1500))")  # what moves has come
            tab.picture(IMAGES / name)
            print(IMAGES / name, (IMAGES / name).stat().st_size, "bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))

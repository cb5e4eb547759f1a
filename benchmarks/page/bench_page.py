# SPDX-License-Identifier: Apache-2.0
"""Frames a second of the live page while it is zoomed and deltas come.

A headless Chromium without a GPU, which draws at most 60 times a second, shows a made-up prefix
cache; each frame zooms on, in and out again, and two deltas come each second. Needs Debian's
package chromium.
"""

import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.support.formatting import Row
from benchmarks.support.options import argument_parser
from benchmarks.support.result import Goal, Result
from tests.page.static.browser import CHROMIUM, Tab, chromium_tab
from tests.page.static.server import FeedServer
from tests.page.static.simulated import SimulatedCache, hello

DELTA_S = 0.5
SIZES_PX = {"1280 x 800": (1280, 800), "3840 x 2160": (3840, 2160)}
# how long the page's own part of each frame takes
TIMED_FRAMES = """
globalThis.spent_ms = [];
const next = requestAnimationFrame;
globalThis.nextFrame = next.bind(globalThis);
globalThis.requestAnimationFrame = (draw) => next((now_ms) => {
  const began_ms = performance.now();
  draw(now_ms);
  spent_ms.push(performance.now() - began_ms);
});
"""
ZOOM = """
new Promise((done) => {
  const canvas = document.querySelector("canvas");
  const { left, top, width } = canvas.getBoundingClientRect();
  const frames_ms = [];
  const began_ms = performance.now();
  spent_ms.length = 0;
  const frame = (now_ms) => {
    frames_ms.push(now_ms);
    if (now_ms - began_ms > SECONDS * 1000) return done({ frames_ms, spent_ms });
    const deltaY = frames_ms.length % 120 < 60 ? -20 : 20;
    const clientX = left + width * 0.37;
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY, clientX, clientY: top + 40 }));
    nextFrame(frame);
  };
  nextFrame(frame);
})
"""


@contextmanager
def told(server: FeedServer, deltas: list[dict]) -> Iterator[None]:
    """Two deltas a second, meanwhile."""
    ended = threading.Event()

    def tell() -> None:
        for delta in deltas:
            if ended.wait(DELTA_S):
                return
            server.send("delta", delta)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(tab: Tab, nodes: int, size: str, seconds: float) -> Row:
    cache = SimulatedCache(nodes=nodes, requests=256)
    snapshot = cache.snapshot()
    deltas = [cache.delta(seconds=DELTA_S, arrivals=60) for _ in range(int(seconds / DELTA_S) + 2)]
    with FeedServer(lambda texts: [("hello", hello()), ("snapshot", snapshot)]).running() as server:
        tab.reset()
        tab.resize(*SIZES_PX[size])
        began_s = time.perf_counter()
        tab.open(server.address)
        tab.wait_text("#columns", f"{len(snapshot['nodes']):,} prefixes")
        shown_s = time.perf_counter() - began_s
        with told(server, deltas):
            found = tab.evaluate(ZOOM.replace("SECONDS", str(seconds)))
    frames_ms = sorted(
        b - a for a, b in zip(found["frames_ms"], found["frames_ms"][1:], strict=False)
    )
    changes = [len(delta["added"]) + len(delta["changed"]) for delta in deltas]
    return {
        "nodes": nodes,
        "page": size,
        "frames/s": 1000 / statistics.mean(frames_ms),
        "frame ms": statistics.mean(frames_ms),
        "p99 ms": frames_ms[int(0.99 * len(frames_ms))],
        "longest ms": frames_ms[-1],
        "script ms": statistics.mean(found["spent_ms"]),
        "nodes a delta": round(statistics.mean(changes)),
        "first shown s": shown_s,
    }


def main(options: Namespace) -> None:
    result = Result.begin(__file__, __doc__, options)
    if CHROMIUM is None:
        if options.smoke:
            return print("no Chromium here: nothing to see")
        raise SystemExit("needs Chromium: apt-get install --no-install-recommends chromium")
    cases = [(10_000, "1280 x 800"), (50_000, "1280 x 800"), (50_000, "3840 x 2160")]
    if options.smoke:
        cases = [(200, "1280 x 800")]
    with chromium_tab() as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=TIMED_FRAMES)
        rows = [measure(tab, nodes, size, options.seconds) for nodes, size in cases]
    result.add_table("Zooming, with two deltas a second", rows)
    if not options.smoke:
        for row in rows[:2]:
            what = f"live page: frames/s with {row['nodes']:,} nodes"
            result.add_goal(Goal(what, row["frames/s"], 30, 60, unit="frames/s"))
    result.end(options)


if __name__ == "__main__":
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--seconds", type=float, default=10, help="of each case (%(default)s)")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.seconds = 1
    main(arguments)

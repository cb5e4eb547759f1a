// SPDX-License-Identifier: Apache-2.0
// The timeline at the foot: KV tokens attended and read over time, and which moment is shown.

import { byId, say, set } from "./dom.js";
import { clock } from "./format.js";

export class Scrubber {
  constructor({ onSeek }) {
    this.canvas = byId("scrubber").querySelector("canvas");
    this.range = byId("time");
    this.range.addEventListener("input", () => onSeek(Number(this.range.value)));
  }

  // shown_s: the moment; recorded: of a recording, whose end is not now.
  show(timeline, { shown_s, recorded }) {
    const { oldest_s, newest_s } = timeline;
    set(this.range, "min", String(oldest_s));
    set(this.range, "max", String(Math.max(newest_s, oldest_s + 1e-3)));
    set(this.range, "value", String(shown_s));
    const behind_s = newest_s - shown_s;
    const now = timeline.following ? "now" : `−${clock(behind_s)}`;
    const text = recorded ? `${clock(shown_s - oldest_s)} / ${clock(newest_s - oldest_s)}` : now;
    say(byId("clock"), text);
    this.range.setAttribute("aria-valuetext", text);
  }

  draw(timeline, { attended, read, line }) {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.canvas;
    const [width, height] = [clientWidth, clientHeight].map((px) => Math.round(px * ratio));
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.fillStyle = line;
    context.fillRect(0, height - 1, width, 1);
    const { entries, oldest_s, newest_s } = timeline;
    if (!entries.length) return;
    const span_s = Math.max(newest_s - oldest_s, 1e-3);
    const columns = columnsOf(entries, width, (t) => ((t - oldest_s) / span_s) * (width - 1));
    const most = Math.max(1, ...columns.map((column) => column.attended));
    for (const [name, colour] of [["attended", attended], ["read", read]]) {
      context.fillStyle = colour;
      columns.forEach((column, x) => {
        const high = (column[name] / most) * (height - 4);
        context.fillRect(x, height - 1 - high, 1, high);
      });
    }
  }
}

// Of each column of pixels what its last entry said; what was said before holds until then.
function columnsOf(entries, width, placeOf) {
  const columns = [];
  let { attended, read } = entries[0].summary;
  let at = 0;
  for (let x = 0; x < width; x++) {
    for (; at < entries.length && placeOf(entries[at].t) <= x; at++)
      ({ attended, read } = entries[at].summary);
    columns.push({ attended, read });
  }
  return columns;
}

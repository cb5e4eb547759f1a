// SPDX-License-Identifier: Apache-2.0
// The timeline at the foot: KV tokens attended and read over time, and which moment is shown.

import { byId, say, set } from "../dom.js";
import { clock, compact } from "../format.js";

const WINDOW_S = 2; // over which rates are taken

export class Scrubber {
  constructor({ onSeek }) {
    this.canvas = byId("scrubber").querySelector("canvas");
    this.range = byId("time");
    this.range.addEventListener("input", () => onSeek(Number(this.range.value)));
  }

  show(timeline, { shown_s, recorded }) {
    const { oldest_s, newest_s } = timeline;
    set(this.range, "min", String(oldest_s));
    set(this.range, "max", String(Math.max(newest_s, oldest_s + 1e-3)));
    set(this.range, "value", String(shown_s));
    const now = timeline.following ? "now" : `−${clock(newest_s - shown_s)}`;
    const text = recorded ? `${clock(shown_s - oldest_s)} / ${clock(newest_s - oldest_s)}` : now;
    say(byId("clock"), text);
    this.range.setAttribute("aria-valuetext", text);
  }

  draw(timeline, colours) {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.canvas;
    const [width, height] = [clientWidth, clientHeight].map((px) => Math.round(px * ratio));
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.fillStyle = colours.line;
    context.fillRect(0, height - 1, width, 1);
    const { entries, oldest_s, newest_s, shown_s } = timeline;
    const per_s = newest_s > oldest_s ? width / (newest_s - oldest_s) : 0;
    const moments = Array.from({ length: width }, (_, x) => oldest_s + x / (per_s || 1));
    const rates = per_s ? ratesAt(entries, moments) : [];
    const most = rates.reduce((most, { attended }) => Math.max(most, attended), 1);
    for (const name of ["attended", "read"]) {
      context.fillStyle = colours[name];
      rates.forEach((rate, x) => {
        const high = (rate[name] / most) * (height - 2);
        context.fillRect(x, height - high, 1, high);
      });
    }
    const [shown] = entries.length ? ratesAt(entries, [shown_s]) : [];
    say(byId("attended-rate"), shown ? `${compact(Math.round(shown.attended))}/s` : "");
    say(byId("read-rate"), shown ? `${compact(Math.round(shown.read))}/s` : "");
  }
}

// Of counters that only rise, how fast they do around each moment; moments are in order.
function ratesAt(entries, moments) {
  const from = countersAt(entries, moments, -WINDOW_S / 2);
  const to = countersAt(entries, moments, WINDOW_S / 2);
  return from.map((before, place) => {
    const after = to[place];
    const rate = (name) => Math.max(0, (after[name] - before[name]) / (after.t - before.t || 1));
    return { attended: rate("attended"), read: rate("read") };
  });
}

// Between two entries they rise evenly; nothing is known before the first and after the last.
function countersAt(entries, moments, offset_s) {
  const [first, last] = [entries[0].t, entries[entries.length - 1].t];
  let at = 0;
  return moments.map((moment) => {
    const t = Math.min(Math.max(moment + offset_s, first), last);
    while (entries[at].t < t) at++;
    const after = entries[at];
    const before = entries[Math.max(at - 1, 0)];
    const part = after.t > before.t ? (t - before.t) / (after.t - before.t) : 1;
    const mix = (name) =>
      before.summary[name] + part * (after.summary[name] - before.summary[name]);
    return { t, attended: mix("attended"), read: mix("read") };
  });
}

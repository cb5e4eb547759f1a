// SPDX-License-Identifier: Apache-2.0
// A forest on a canvas: a row for each depth, widths in tokens, the part in view stretched to fit.

import { STEPS } from "./colours.js";

const NARROW_PX = 1; // below it, neighbours are drawn together
const ZOOM_MS = 220;
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const LEAVES_SOON = 12; // as many are numbered in the order in which they leave

export class Icicle {
  #view = { start: 0, end: 1, top: 0 }; // of the forest's width; in rows
  #moving = null;
  #rects = Array.from({ length: STEPS }, () => []);
  #labels = [];
  #marks = [];

  constructor(canvas, forest) {
    this.canvas = canvas;
    this.forest = forest;
    this.context = canvas.getContext("2d", { alpha: false });
  }

  get moving() {
    return this.#moving !== null;
  }

  get zoomed() {
    const { start, end } = this.#moving?.to ?? this.#view;
    return end - start < 0.9999;
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [clientWidth, clientHeight].map((px) => Math.round(px * ratio));
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    this.width = clientWidth;
    this.height = clientHeight;
    this.ratio = ratio;
  }

  // Rows share the height, within what can be read and what looks like a row.
  rowHeight(rem) {
    const { rows } = this.forest.layOut();
    return Math.min(5.5 * rem, Math.max(1.5 * rem, this.height / Math.max(rows, 1)));
  }

  // Fills the width with a node and what is below it; all of the forest if there is none.
  zoomTo(node, rem, animated = true) {
    const { total } = this.forest.layOut();
    let to = { start: 0, end: 1, top: 0 };
    if (node && total) {
      const visible = this.height / this.rowHeight(rem);
      const deep = node.depth + node.height > visible;
      const top = deep ? Math.max(0, node.depth - 1) : 0;
      to = { start: node.start / total, end: (node.start + node.width) / total, top };
    }
    animated &&= !STILL.matches;
    this.#moving = animated ? { from: { ...this.#view }, to, since: performance.now() } : null;
    if (!animated) this.#view = to;
  }

  // Around a place of the canvas, by a factor; moves by pixels.
  zoomBy(factor, px) {
    const { start, end, top } = this.#view;
    const centre = start + (px / this.width) * (end - start);
    const span = Math.min(1, Math.max(1e-7, (end - start) * factor));
    this.#show(centre - (px / this.width) * span, span, top);
  }

  moveBy(dx, dy, rem) {
    const { start, end, top } = this.#view;
    const span = end - start;
    this.#show(start - (dx / this.width) * span, span, top - dy / this.rowHeight(rem));
  }

  #show(start, span, top) {
    this.#moving = null;
    start = Math.min(Math.max(start, 0), 1 - span);
    this.#view = { start, end: start + span, top: Math.max(0, top) };
  }

  // So that a node can be seen: moves there only if it is out of view.
  reveal(node, rem) {
    const { total } = this.forest.layOut();
    const { start, end, top } = this.#view;
    const [left, right] = [node.start / total, (node.start + node.width) / total];
    const rows = Math.max(1, Math.floor(this.height / this.rowHeight(rem)));
    const inside = right > start && left < end && (right - left) / (end - start) > 3 / this.width;
    if (!inside) return this.zoomTo(node.above ?? node, rem);
    if (node.depth < top) this.#view.top = node.depth;
    if (node.depth >= top + rows) this.#view.top = node.depth - rows + 1;
  }

  nodeAt(x, y, rem) {
    const { total } = this.forest.layOut();
    const { start, end, top } = this.#view;
    const depth = Math.floor(y / this.rowHeight(rem) + top);
    const place = (start + (x / this.width) * (end - start)) * total;
    let nodes = this.forest.roots;
    for (let row = 0; ; row++) {
      const node = lastBeginningBefore(nodes, place);
      if (!node || place >= node.start + node.width) return null;
      if (row === depth) return node;
      nodes = node.children;
    }
  }

  // Where a node is, in pixels of the canvas.
  boxOf(node, rem) {
    const { total } = this.forest.layOut();
    const { start, end, top } = this.#view;
    const scale = this.width / ((end - start) * total);
    const height = this.rowHeight(rem);
    return {
      x: (node.start - start * total) * scale,
      y: (node.depth - top) * height,
      width: node.width * scale,
      height,
    };
  }

  // marks: {hovered, focused, selected}, nodes or null; labelOf(node): what it says.
  draw(palette, { step, now_s, labelOf, marks }) {
    this.#advance();
    const { context, width, ratio } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = palette.surface;
    context.fillRect(0, 0, width, this.height);
    if (!this.forest.nodes.size) return;
    const rowHeight = this.rowHeight(palette.rem);
    this.#collect(rowHeight, step, now_s);
    for (let at = 0; at < STEPS; at++) {
      const rects = this.#rects[at];
      context.fillStyle = palette.ramp[at];
      for (let i = 0; i < rects.length; i += 4)
        context.fillRect(rects[i], rects[i + 1], rects[i + 2], rects[i + 3]);
      rects.length = 0;
    }
    this.#drawMarks(palette, rowHeight);
    this.#drawLabels(palette, rowHeight, labelOf);
    for (const [node, line, colour] of [
      [marks.hovered, 1, palette.ink],
      [marks.focused, 2, palette.ink],
      [marks.selected, 2.5, palette.ink],
    ])
      if (node) this.#outline(node, line, colour, palette.rem);
  }

  #advance() {
    if (!this.#moving) return;
    const { from, to, since } = this.#moving;
    const part = Math.min(1, (performance.now() - since) / ZOOM_MS);
    const eased = 1 - (1 - part) ** 3;
    for (const name of Object.keys(to))
      this.#view[name] = from[name] + (to[name] - from[name]) * eased;
    if (part === 1) this.#moving = null;
  }

  #collect(rowHeight, step, now_s) {
    const { total } = this.forest.layOut();
    const { start, end, top } = this.#view;
    const scale = this.width / ((end - start) * total);
    const from = start * total;
    this.#labels.length = this.#marks.length = 0;
    const pending = [this.forest.roots];
    while (pending.length) {
      const nodes = pending.pop();
      const y = this.#snap((nodes[0].depth - top) * rowHeight);
      if (y >= this.height) continue;
      const first = Math.max(0, firstEndingAfter(nodes, from));
      let together = null;
      for (let i = first; i < nodes.length; i++) {
        const node = nodes[i];
        const x = (node.start - from) * scale;
        if (x > this.width) break;
        const width = node.width * scale;
        const heat = step(node, now_s);
        if (width < NARROW_PX) {
          together ??= { x, heat: 0, height: 1, running: false };
          together.heat = Math.max(together.heat, heat);
          together.height = Math.max(together.height, node.height);
          together.running ||= node.running > 0;
          together.end = x + width;
          if (together.end - together.x < NARROW_PX) continue;
        }
        if (together) together = this.#drawTogether(together, y, rowHeight);
        if (width < NARROW_PX) continue;
        const gap = width > 4 ? 1 : 0;
        const left = this.#snap(Math.max(x, -2));
        const seen = this.#snap(Math.min(x + width, this.width + 2)) - left - gap;
        this.#rects[heat].push(left, y, seen, rowHeight - 1);
        const box = { node, x: left, y, width: seen, heat };
        const marked = node.running || node.pinned_tokens || node.module || node.next_out !== null;
        if (marked) this.#marks.push(box);
        if (seen > 2.2 * rowHeight || seen > 48) this.#labels.push(box);
        if (node.children.length) pending.push(node.children);
      }
      if (together) this.#drawTogether(together, y, rowHeight);
    }
  }

  // What is too narrow to be told apart, with all that is below it.
  #drawTogether({ x, end, heat, height, running }, y, rowHeight) {
    const left = this.#snap(x);
    const box = { x: left, y, width: Math.max(this.#snap(end) - left, 1 / this.ratio), heat };
    this.#rects[heat].push(left, y, box.width, height * rowHeight - 1);
    if (running) this.#marks.push({ ...box, node: null });
    return null;
  }

  // To whole pixels of the screen: neighbours have no seam between them.
  #snap(px) {
    return Math.round(px * this.ratio) / this.ratio;
  }

  #drawMarks(palette, rowHeight) {
    const { context } = this;
    const strip = Math.max(2, Math.round(palette.rem / 5));
    context.fillStyle = palette.accent;
    for (const { node, x, y, width } of this.#marks) {
      if (node && !node.running) continue;
      const high = node?.shared > 1 ? 2 * strip : strip;
      context.fillRect(x, y + rowHeight - 1 - high, width, high);
    }
    context.fillStyle = palette.pinned;
    for (const { node, x, y, width } of this.#marks) {
      if (!node || width < 6) continue;
      const part = node.pinned_tokens / node.tokens;
      if (part) context.fillRect(x, y, Math.min(4, width / 2), part * (rowHeight - 1));
    }
  }

  #drawLabels(palette, rowHeight, labelOf) {
    const { context } = this;
    const size = Math.min(0.85 * palette.rem, 0.62 * rowHeight);
    context.font = `500 ${size}px ${palette.font}`;
    context.textBaseline = "middle";
    const letter = 0.52 * size;
    const pad = 0.5 * size;
    for (const { node, x, y, width, heat } of this.#labels) {
      const middle = y + (rowHeight - 3) / 2;
      let left = Math.max(x, 0) + pad + (node.pinned_tokens ? 4 : 0);
      let right = Math.min(x + width, this.width) - pad;
      const badge = badgeOf(node);
      if (badge && right - left > letter * (badge.text.length + 2)) {
        const wide = context.measureText(badge.text).width + size;
        context.fillStyle = badge.shared ? palette.accent : palette.surface;
        context.beginPath();
        context.roundRect(right - wide, middle - 0.7 * size, wide, 1.4 * size, 0.7 * size);
        context.fill();
        context.fillStyle = badge.shared ? palette.accentInk : palette.ink;
        context.fillText(badge.text, right - wide + size / 2, middle + 0.5);
        right -= wide + pad;
      }
      const letters = Math.floor((right - left) / letter);
      if (letters < 3) continue;
      const label = labelOf(node);
      context.fillStyle = palette.inks[heat];
      context.fillText(
        fitted(context, label, letters, right - left),
        left,
        middle + 0.5,
        right - left,
      );
    }
  }

  #outline(node, line, colour, rem) {
    if (this.forest.nodes.get(node.id) !== node) return;
    const { x, y, width, height } = this.boxOf(node, rem);
    const left = Math.max(x, 0);
    const right = Math.min(x + Math.max(width, 3), this.width);
    if (right < left) return;
    this.context.strokeStyle = colour;
    this.context.lineWidth = line;
    const inset = line / 2;
    this.context.strokeRect(left + inset, y + inset, right - left - line, height - line - 1);
  }
}

function badgeOf(node) {
  if (node.shared > 1) return { text: `${node.shared}×`, shared: true };
  if (node.next_out !== null && node.next_out < LEAVES_SOON)
    return { text: `out ${node.next_out + 1}`, shared: false };
  return null;
}

function fitted(context, label, letters, width) {
  if (label.length <= letters && context.measureText(label).width <= width) return label;
  let cut = label.slice(0, Math.min(label.length, Math.ceil(letters * 1.2)));
  while (cut.length > 2 && context.measureText(`${cut}…`).width > width)
    cut = cut.slice(0, -Math.max(1, Math.floor(cut.length / 12)));
  return `${cut.trimEnd()}…`;
}

function firstEndingAfter(nodes, place) {
  let low = 0;
  let high = nodes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (nodes[middle].start + nodes[middle].width <= place) low = middle + 1;
    else high = middle;
  }
  return low;
}

function lastBeginningBefore(nodes, place) {
  const next = firstEndingAfter(nodes, place);
  return next < nodes.length && nodes[next].start <= place ? nodes[next] : null;
}

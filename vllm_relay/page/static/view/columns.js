// SPDX-License-Identifier: Apache-2.0
// A column for each source: its name, its figures and its forest, with mouse and fingers.

import { byId, element, say, set } from "../dom.js";
import { showMemory } from "./figures.js";
import { compact, count, percent, plural } from "../format.js";
import { Icicle } from "./icicle.js";

const DRAG_PX = 4;
const ENDED_SHOWN_S = 60; // a source that has ended

export class Columns {
  #columns = new Map(); // {forest, section, icicle, ...} of each source

  // page: {rem(), onHover(place, event), onFocus(source), onSelect(place), onChange()}
  constructor(page) {
    this.page = page;
    this.target = byId("columns");
    this.observer = new ResizeObserver(() => this.resize());
  }

  get icicles() {
    return [...this.#columns.values()].filter(({ section }) => !section.hidden);
  }

  of(source) {
    return this.#columns.get(source);
  }

  resize() {
    for (const { icicle } of this.icicles) icicle.resize();
    this.page.onChange();
  }

  // As many columns as there are sources, and those that have ended lately.
  show(forests, shown_s) {
    for (const [id, column] of this.#columns) {
      if (forests.get(id) === column.forest) continue;
      this.observer.unobserve(column.icicle.canvas);
      column.section.remove();
      this.#columns.delete(id);
    }
    for (const forest of forests.values())
      if (!this.#columns.has(forest.id)) this.#columns.set(forest.id, this.#make(forest));
    let seen = 0;
    for (const column of this.#columns.values()) {
      const { stats, gone_s } = column.forest;
      const ended = gone_s !== null && shown_s - gone_s < ENDED_SHOWN_S;
      set(column.section, "hidden", !stats && !ended);
      if (!column.section.hidden) seen++;
      this.#showHead(column);
    }
    this.target.dataset.sources = seen;
  }

  draw(palette, options) {
    for (const { forest, icicle, out } of this.icicles) {
      if (!icicle.width) icicle.resize();
      icicle.draw(palette, {
        ...options,
        now_s: options.nowOf(forest),
        marks: options.marksOf(forest),
      });
      set(out, "hidden", !icicle.zoomed);
    }
  }

  #showHead({ forest, name, facts, memory, icicle }) {
    const { nodes, stats } = forest;
    const { total } = forest.layOut();
    say(name, forest.name);
    const said = [plural(nodes.size, "prefix", "prefixes"), `${compact(total)} tokens`];
    if (forest.gone_s !== null) said.splice(0, 2, "has ended");
    if (stats) {
      const waiting = Object.values(stats.waiting).reduce((sum, n) => sum + n, 0);
      said.push(`${count(stats.running)} running`, `${count(waiting)} waiting`);
      const { prefix_hit_tokens: hits, prefix_query_tokens: queries } = stats;
      if (queries) said.push(`${percent(hits / queries)} hits`);
      showMemory(memory, stats.memory_blocks);
    }
    say(facts, said.join(" · "));
    icicle.canvas.setAttribute(
      "aria-label",
      `Prefix forest of ${forest.name}: ${said.join(", ")}. Arrow keys walk, Enter selects.`,
    );
  }

  #make(forest) {
    const canvas = element("canvas", { tabIndex: 0, role: "application" });
    const icicle = new Icicle(canvas, forest);
    const name = element("h2");
    const facts = element("p");
    const memory = element("div", { className: "memory", ariaHidden: "true" });
    const out = element("button", {
      type: "button",
      title: "Zoom out (Esc)",
      onclick: () => this.#zoom(forest, null),
    });
    say(out, "Whole forest");
    const head = element("div", { className: "source-head" }, name, facts, out);
    const section = element("section", { className: "source" }, head, memory, canvas);
    section.dataset.source = forest.id;
    this.target.append(section);
    this.observer.observe(canvas);
    this.#listen(canvas, icicle, forest);
    return { forest, section, icicle, name, facts, memory, out };
  }

  #zoom(forest, node) {
    this.of(forest.id).icicle.zoomTo(node, this.page.rem());
    this.page.onChange();
  }

  zoomTo({ source, id }) {
    const { forest } = this.of(source);
    this.#zoom(forest, forest.nodes.get(id));
  }

  #listen(canvas, icicle, forest) {
    const { page } = this;
    let pressed = null;
    const placeAt = ({ offsetX, offsetY }) => {
      const node = icicle.nodeAt(offsetX, offsetY, page.rem());
      return node && { source: forest.id, id: node.id };
    };
    canvas.addEventListener("pointerdown", (event) => {
      pressed = { x: event.clientX, y: event.clientY, dragged: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!pressed) return page.onHover(placeAt(event), event);
      const [dx, dy] = [event.clientX - pressed.x, event.clientY - pressed.y];
      if (!pressed.dragged && Math.hypot(dx, dy) < DRAG_PX) return;
      pressed = { x: event.clientX, y: event.clientY, dragged: true };
      icicle.moveBy(dx, dy, page.rem());
      page.onHover(null);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (pressed && !pressed.dragged) page.onSelect(placeAt(event));
      pressed = null;
    });
    canvas.addEventListener("pointercancel", () => (pressed = null));
    canvas.addEventListener("pointerleave", () => page.onHover(null));
    canvas.addEventListener("dblclick", (event) => {
      const place = placeAt(event);
      this.#zoom(forest, place && forest.nodes.get(place.id));
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const { deltaX, deltaY } = event;
        if (event.shiftKey) icicle.moveBy(0, -(deltaY || deltaX), page.rem());
        else if (Math.abs(deltaX) > Math.abs(deltaY)) icicle.moveBy(-deltaX, 0, page.rem());
        else icicle.zoomBy(Math.exp(deltaY / 400), event.offsetX);
        page.onChange();
      },
      { passive: false },
    );
    canvas.addEventListener("focus", () => page.onFocus(forest.id));
    canvas.addEventListener("blur", () => page.onHover(null));
  }
}

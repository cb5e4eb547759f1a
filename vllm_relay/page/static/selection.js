// SPDX-License-Identifier: Apache-2.0
// Which prefixes are pointed at, walked to and selected; they are places, {source, id}, since nodes
// come and go.

import { byId, say, set } from "./dom.js";
import { plural, shortened } from "./format.js";

const TIP_LETTERS = 240;

export class Selection {
  hovered = null;
  focused = null;
  selected = null;
  #tipped = null;

  // page: {timeline, columns, look, onChange()}
  constructor(page) {
    this.page = page;
  }

  nodeOf(place) {
    return (place && this.page.timeline.forests.get(place.source)?.nodes.get(place.id)) ?? null;
  }

  marksOf(forest) {
    const mark = (place) => (place?.source === forest.id ? this.nodeOf(place) : null);
    return {
      hovered: mark(this.hovered),
      focused: mark(this.focused),
      selected: mark(this.selected),
    };
  }

  // event: of the mouse, which is there
  hover(place, event) {
    this.hovered = place;
    this.#showTip(place, event);
    this.page.onChange();
  }

  // The keyboard has come to a forest.
  enter(source) {
    if (this.focused?.source === source && this.nodeOf(this.focused)) return;
    const first = this.page.timeline.forests.get(source).roots[0];
    if (first) this.focused = { source, id: first.id };
    this.page.onChange();
  }

  select(place) {
    this.hideTip(); // the panel has it now
    this.selected = this.focused = place;
    this.page.onChange();
  }

  reveal(place) {
    const node = this.nodeOf(place);
    if (node) this.page.columns.of(place.source).icicle.reveal(node, this.page.rem());
  }

  walk(way) {
    const { forests } = this.page.timeline;
    let node = this.nodeOf(this.focused);
    let source = this.focused?.source;
    if (node) {
      const siblings = forests.get(source).siblings(node);
      const at = siblings.indexOf(node);
      const [up, down] = [node.above, node.children[0]];
      node = { up, down, left: siblings[at - 1], right: siblings[at + 1] }[way] ?? node;
    } else {
      const forest = [...forests.values()].find(({ roots }) => roots.length);
      if (!forest) return;
      source = forest.id;
      node = forest.roots[0];
    }
    this.focused = { source, id: node.id };
    this.reveal(this.focused);
    this.page.columns.of(source).icicle.canvas.focus({ preventScroll: true });
    this.#showTip(this.focused);
    this.page.onChange();
  }

  hideTip() {
    this.#showTip(null);
  }

  // With what is known now, where it is.
  refreshTip() {
    const node = this.nodeOf(this.#tipped);
    set(byId("tip"), "hidden", !node);
    if (!node) return;
    const facts = [
      plural(node.tokens, "token"),
      plural(node.hits, "hit"),
      node.running && `${node.running} running`,
      node.shared > 1 && `read together by ${node.shared}`,
    ];
    const [text, said] = byId("tip").children;
    say(text, shortened(this.page.look.labelOf(node), TIP_LETTERS));
    say(said, facts.filter(Boolean).join(" · "));
  }

  #showTip(place, event) {
    this.#tipped = place;
    this.refreshTip();
    const node = this.nodeOf(place);
    if (!node) return;
    const tip = byId("tip");
    const { icicle } = this.page.columns.of(place.source);
    const canvas = icicle.canvas.getBoundingClientRect();
    const box = icicle.boxOf(node, this.page.rem());
    const x = event ? event.clientX + 14 : canvas.left + Math.max(0, box.x);
    const y = event ? event.clientY + 18 : canvas.top + box.y + box.height + 6;
    const { offsetWidth, offsetHeight } = tip;
    tip.style.left = `${Math.max(4, Math.min(x, innerWidth - offsetWidth - 8))}px`;
    tip.style.top = `${y + offsetHeight > innerHeight ? y - offsetHeight - 30 : y}px`;
  }
}

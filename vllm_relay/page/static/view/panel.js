// SPDX-License-Identifier: Apache-2.0
// The side: all that is known of the selected prefix, and lists of prefixes to select from.

import { byId, element, resized, say, set } from "../dom.js";
import { compact, count, duration, ordinal, plural, shortened } from "../format.js";

const LISTED = 12;
const KEYS = {
  pin: "Its whole prefix stays cached (P)",
  evict: "It and all that continues it is cached no more (E)",
};

// hits x tokens: what was not computed again because of it
const worth = (node) => node.hits * node.tokens;

const LISTS = {
  worth: {
    title: "Worth most",
    hint: "Prompt tokens that were not computed again.",
    none: "No prefix was hit yet.",
    has: (node) => worth(node) > 0,
    before: (a, b) => worth(b) - worth(a),
    number: (node) => compact(worth(node)),
  },
  leaving: {
    title: "Leaves next",
    hint: "In the order of eviction, when memory is wanted.",
    none: "Nothing can be evicted: all of it is in use or pinned.",
    has: (node) => node.next_out !== null,
    before: (a, b) => a.next_out - b.next_out,
    number: (node) => plural(node.blocks, "block"),
  },
  kept: {
    title: "Pinned, modules",
    hint: "",
    none: "Nothing is pinned. Select a prefix and press P.",
    has: (node) => node.pinned_tokens || node.module !== null,
    before: (a, b) => b.tokens - a.tokens || a.id - b.id,
    number: (node) => `${compact(node.tokens)} tokens`,
  },
};

export class Panel {
  #list = "worth";
  #facts = new Map();

  // page: {look, onChange(), onSelect(place), onZoom(place), onPin(place), onUnpin(pin id),
  // onEvict(place)}
  constructor(page) {
    this.page = page;
    this.#makeNode();
    this.#makeLists();
  }

  #makeNode() {
    const button = (text, title, onclick) =>
      element("button", { type: "button", textContent: text, title, onclick });
    this.title = element("h2");
    this.path = element("p", { className: "path" });
    this.list = element("dl");
    this.zoom = button("Zoom to it", "Z", () => this.page.onZoom(this.place));
    this.pin = button("Pin", KEYS.pin, () => this.page.onPin(this.place));
    this.evict = button("Evict", KEYS.evict, () => this.page.onEvict(this.place));
    this.actions = element("div", { className: "actions" }, this.pin, this.evict, this.zoom);
    this.said = element("p", { className: "said" });
    this.said.setAttribute("role", "status");
    this.text = element("blockquote");
    this.details = element("div", {}, this.path, this.list, this.actions, this.text);
    this.nothing = element("p", {
      className: "nothing",
      textContent: "Click a prefix, or walk with the arrow keys and press Enter.",
    });
    byId("node").append(this.title, this.details, this.nothing, this.said);
  }

  #makeLists() {
    const tabs = element("div", { className: "tabs", role: "tablist" });
    for (const [name, { title }] of Object.entries(LISTS)) {
      const onclick = () => {
        this.#list = name;
        this.page.onChange();
      };
      const tab = element("button", { type: "button", role: "tab", textContent: title, onclick });
      tab.dataset.list = name;
      tabs.append(tab);
    }
    this.tabs = tabs;
    this.hint = element("p", { className: "hint" });
    this.rows = element("ul", { className: "rows" });
    this.pinsTitle = element("h3", { textContent: "Pins of the server" });
    this.pins = element("ul", { className: "rows" });
    byId("lists").append(tabs, this.hint, this.rows, this.pinsTitle, this.pins);
  }

  get told() {
    return this.said.textContent;
  }

  tell(text, bad = false) {
    say(this.said, text);
    this.said.classList.toggle("bad", bad);
  }

  // selected: {place, forest, node, now_s, pin, problem} or null; problem: why nothing can be
  // changed now; pin: the id of its pin, if known
  showNode(selected) {
    set(this.details, "hidden", !selected);
    set(this.nothing, "hidden", Boolean(selected));
    this.place = selected?.place ?? null;
    byId("node").dataset.node = selected ? selected.node.id : "";
    if (!selected) return say(this.title, "No prefix selected");
    const { node, forest, now_s, pin, problem, several } = selected;
    const named = node.module ? `Module ${node.module}` : this.page.look.labelOf(node);
    say(this.title, shortened(named, 90));
    const path = node.path();
    const where =
      path.length === 1 ? "a beginning of prompts" : `${ordinal(path.length)} from the top`;
    say(this.path, several ? `${forest.name} · ${where}` : where);
    const facts = {
      Tokens: count(node.tokens),
      "From the beginning": plural(node.prefixTokens(), "token"),
      Blocks: count(node.blocks),
      Hits: node.hits ? plural(node.hits, "time") : "none yet",
      "Saved so far": plural(worth(node), "prompt token"),
      "Last used": node.running ? "now" : `${duration(Math.max(0, now_s - node.last_used_s))} ago`,
      Running: node.running ? plural(node.running, "request") : "none",
      "Read together": node.shared > 1 ? `by ${node.shared} requests` : "no",
      Pinned: pinnedPart(node),
      Leaves: leaves(node),
      Continued: node.children.length ? `in ${plural(node.children.length, "way")}` : "not yet",
      Requests: node.requests.length ? node.requests.join("\n") : "none",
    };
    for (const [name, value] of Object.entries(facts)) {
      if (!this.#facts.has(name)) {
        this.#facts.set(name, element("dd"));
        this.list.append(element("dt", { textContent: name }), this.#facts.get(name));
      }
      say(this.#facts.get(name), value);
    }
    say(this.pin, node.pinned_tokens && pin ? "Unpin" : "Pin");
    const foreign =
      node.pinned_tokens === node.tokens &&
      !pin &&
      "Pinned elsewhere: unpin it under Pinned, modules.";
    this.#allow(this.pin, problem || foreign, KEYS.pin);
    const used = node.pinned_tokens ? "Unpin it first." : node.running ? "Requests run on it." : "";
    this.#allow(this.evict, problem || used, KEYS.evict);
    const shown = this.page.look.textOf(node);
    set(this.text, "hidden", !shown);
    if (shown) say(this.text, node.text.length >= 400 ? `${node.text}…` : node.text);
  }

  #allow(button, problem, title) {
    set(button, "disabled", Boolean(problem));
    set(button, "title", problem || title);
  }

  // forests: those that are seen; pins: of the server; problem: as in showNode
  showLists(forests, pins, problem) {
    const list = LISTS[this.#list];
    for (const tab of this.tabs.children)
      tab.ariaSelected = String(tab.dataset.list === this.#list);
    const found = [];
    for (const forest of forests)
      for (const node of forest.nodes.values()) if (list.has(node)) found.push({ forest, node });
    const best = firstOf(found, LISTED, (a, b) => list.before(a.node, b.node));
    say(this.hint, best.length ? list.hint : list.none);
    set(this.hint, "hidden", !this.hint.textContent);
    resized(this.rows, best.length, () => this.#makeRow()).forEach((row, place) => {
      const { forest, node } = best[place];
      row.place = { source: forest.id, id: node.id };
      const [name, number] = row.firstChild.children;
      say(name, shortened(node.module ?? this.page.look.labelOf(node), 80));
      say(number, list.number(node));
    });
    const showsPins = this.#list === "kept" && pins.length > 0;
    set(this.pinsTitle, "hidden", !showsPins);
    resized(this.pins, showsPins ? pins.length : 0, () => this.#makePin()).forEach((row, place) => {
      const pin = pins[place];
      row.pin = pin.id;
      const [facts, button] = row.children;
      const ends = pin.expires_in_s === null ? "" : `, for ${duration(pin.expires_in_s)}`;
      say(facts.firstChild, pin.id);
      say(facts.lastChild, pin.problem ?? `${compact(pin.tokens)} tokens${ends}`);
      this.#allow(button, problem, `Unpin ${pin.id}`);
    });
  }

  #makeRow() {
    const row = element("li");
    const onclick = () => this.page.onSelect(row.place, true);
    row.append(
      element("button", { type: "button", className: "row", onclick }, ...nameAndNumber()),
    );
    return row;
  }

  #makePin() {
    const row = element("li");
    const onclick = () => this.page.onUnpin(row.pin);
    const button = { type: "button", className: "small", textContent: "Unpin", onclick };
    row.append(element("div", { className: "row" }, ...nameAndNumber()), element("button", button));
    return row;
  }
}

const nameAndNumber = () => [
  element("span", { className: "name" }),
  element("span", { className: "number" }),
];

function pinnedPart({ tokens, pinned_tokens: pinned }) {
  if (pinned === tokens) return "all of it";
  return pinned ? `its first ${plural(pinned, "token")}` : "no";
}

function leaves(node) {
  if (node.pinned_tokens === node.tokens) return "never, while it is pinned";
  if (node.running) return "not while requests run on it";
  if (node.next_out === null) return "not soon";
  return node.next_out ? `${ordinal(node.next_out + 1)} in the order of eviction` : "first";
}

// The first of a list in an order, without putting all of it in order.
function firstOf(all, wanted, before) {
  const first = [];
  for (const each of all) {
    if (first.length === wanted && before(each, first[wanted - 1]) >= 0) continue;
    let place = first.length;
    while (place && before(each, first[place - 1]) < 0) place--;
    first.splice(place, 0, each);
    if (first.length > wanted) first.pop();
  }
  return first;
}

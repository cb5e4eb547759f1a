// SPDX-License-Identifier: Apache-2.0
// The page: what comes from the feed goes to the timeline, and what that shows to the screen.

import { COLOURINGS, paletteOf } from "./colours.js";
import { Columns } from "./columns.js";
import { Commands } from "./commands.js";
import { byId, element, say, set } from "./dom.js";
import { Feed, keepApiKey, recordedEvents } from "./feed.js";
import { showFigures } from "./figures.js";
import { FeedError } from "./forest.js";
import { compact, plural } from "./format.js";
import { listenToKeys } from "./keys.js";
import { Panel } from "./panel.js";
import { Scrubber } from "./scrubber.js";
import { emptyState } from "./states.js";
import { Timeline, summarize } from "./timeline.js";

const REFRESH_MS = 250; // of what is no canvas
const THEMES = ["auto", "light", "dark"];

class Page {
  timeline = new Timeline();
  hello = null;
  state = { kind: "connecting" };
  colouring = "hits";
  texts = localStorage.getItem("relay-texts") !== "hidden";
  theme = localStorage.getItem("relay-theme") ?? "auto";
  #places = { hovered: null, focused: null, selected: null }; // {source, id}
  #ahead_s = 0; // of the server's clock before ours
  #frame = 0;
  #refreshed_ms = -Infinity;
  #palette = null;
  #keptBlocks = null;
  #played = null; // of a recording: {at_s, since_ms} while it runs

  constructor() {
    this.recording = new URLSearchParams(location.search).get("replay");
    this.commands = new Commands();
    this.columns = new Columns(this);
    this.panel = new Panel(this);
    this.scrubber = new Scrubber({ onSeek: (t) => this.seek(t) });
    this.feed = new Feed(
      (event) => this.#take(event),
      (state) => this.#showState(state),
    );
    this.#listen();
    listenToKeys(this);
    this.setTheme(this.theme);
    byId("texts").checked = this.texts;
    if (this.recording) this.#openRecording();
    else this.feed.start({ texts: this.texts });
    // ages, and pins that end
    setInterval(() => this.onChange(), 1000);
  }

  // ---- what comes in

  #take({ event, data }) {
    const now_s = Date.now() / 1000;
    if (event === "hello") {
      this.hello = data;
      this.timeline.setSources(now_s, data.sources);
      this.#readPins();
    } else {
      try {
        if (data.time_s) this.#ahead_s = data.time_s - now_s;
        this.timeline.push(now_s, event, data);
      } catch (error) {
        // a new snapshot comes when the feed is asked again; what was before is no longer sure
        if (error instanceof FeedError) this.timeline = new Timeline();
        throw error;
      }
      const kept = data.stats && data.stats.memory_blocks.pinned;
      if (event !== "gone" && kept !== this.#keptBlocks) {
        this.#keptBlocks = kept;
        this.#readPins();
      }
    }
    this.onChange();
  }

  // A server whose scheduler has no pins says so; then there are none.
  #readPins() {
    if (this.recording) return;
    this.commands.readPins().then(
      () => this.onChange(),
      () => {},
    );
  }

  async #openRecording() {
    try {
      const events = await recordedEvents(this.recording);
      this.timeline = new Timeline(Infinity);
      this.timeline.pause();
      for (const { t, event, data } of events) {
        if (event === "hello") {
          this.hello = data;
          this.timeline.setSources(t, data.sources);
        } else {
          this.timeline.push(t, event, data);
        }
      }
      this.timeline.seek(this.timeline.oldest_s);
      this.#showState({ kind: "recording" });
      this.#play(this.timeline.oldest_s);
    } catch (error) {
      this.#showState({ kind: "off", reason: error.message });
    }
  }

  // ---- time

  get #atEnd() {
    return this.timeline.shown === this.timeline.entries.length;
  }

  #play(at_s) {
    this.#played = { at_s, since_ms: performance.now() };
    this.onChange();
  }

  get #shown_s() {
    if (!this.#played) return this.timeline.shown_s;
    return this.#played.at_s + (performance.now() - this.#played.since_ms) / 1000;
  }

  #advance() {
    if (!this.#played) return;
    this.timeline.seek(this.#shown_s);
    if (this.#atEnd) this.#played = null;
  }

  togglePause() {
    const { timeline } = this;
    if (this.recording) {
      if (this.#played) this.#played = null;
      else this.#play(this.#atEnd ? timeline.oldest_s : timeline.shown_s);
    } else if (timeline.following) timeline.pause();
    else timeline.follow();
    this.onChange();
  }

  seek(t) {
    this.timeline.pause();
    this.timeline.seek(t);
    if (this.#played) this.#play(t);
    this.onChange();
  }

  step(entries) {
    this.#played = null;
    this.timeline.pause();
    this.timeline.step(entries);
    this.onChange();
  }

  goLive() {
    if (this.recording) return this.seek(this.timeline.newest_s);
    this.timeline.follow();
    this.onChange();
  }

  #nowOf(forest) {
    const { following } = this.timeline;
    return following ? Date.now() / 1000 + this.#ahead_s : forest.time_s;
  }

  // ---- places in forests

  #nodeOf(place) {
    return (place && this.timeline.forests.get(place.source)?.nodes.get(place.id)) ?? null;
  }

  #hold(name, place) {
    this.#places[name] = place;
    this.onChange();
  }

  onHover(place, event) {
    this.#hold("hovered", place);
    this.#showTip(place, event);
  }

  onFocus(source) {
    if (this.#places.focused?.source === source && this.#nodeOf(this.#places.focused)) return;
    const first = this.timeline.forests.get(source).roots[0];
    if (first) this.#hold("focused", { source, id: first.id });
  }

  onSelect(place, reveals = false) {
    this.panel.tell("");
    this.#hold("selected", place);
    this.#hold("focused", place);
    const node = this.#nodeOf(place);
    if (node && reveals) this.columns.of(place.source).icicle.reveal(node, this.rem());
    this.#refreshed_ms = -Infinity;
  }

  selectFocused() {
    if (this.#nodeOf(this.#places.focused)) this.onSelect(this.#places.focused);
  }

  walk(way) {
    let { focused } = this.#places;
    let node = this.#nodeOf(focused);
    if (!node) {
      const forest = [...this.timeline.forests.values()].find(({ roots }) => roots.length);
      if (!forest) return;
      focused = { source: forest.id, id: forest.roots[0].id };
      node = forest.roots[0];
    } else {
      const siblings = this.timeline.forests.get(focused.source).siblings(node);
      const at = siblings.indexOf(node);
      const [up, down] = [node.above, node.children[0]];
      node = { up, down, left: siblings[at - 1], right: siblings[at + 1] }[way] ?? node;
    }
    const place = { source: focused.source, id: node.id };
    this.#hold("focused", place);
    const { icicle, section } = this.columns.of(place.source);
    icicle.reveal(node, this.rem());
    section.querySelector("canvas").focus({ preventScroll: true });
    this.#showTip(place);
  }

  zoomToFocused() {
    const { focused, selected } = this.#places;
    const place = this.#nodeOf(focused) ? focused : selected;
    if (this.#nodeOf(place)) this.columns.zoomTo(place);
  }

  onZoom(place) {
    if (this.#nodeOf(place)) this.columns.zoomTo(place);
  }

  leave() {
    this.#showTip(null);
    const zoomed = this.columns.icicles.filter(({ icicle }) => icicle.zoomed);
    for (const { icicle } of zoomed) icicle.zoomTo(null, this.rem());
    if (!zoomed.length) this.onSelect(null);
    this.onChange();
  }

  // ---- what the server is asked to do

  get #problem() {
    if (this.recording) return "This is a recording.";
    if (!this.timeline.following) return "Go back to now first (Home).";
    return this.state.kind === "live" ? "" : "The server cannot be reached now.";
  }

  async #command(run) {
    if (this.#problem) return this.panel.tell(this.#problem, true);
    try {
      this.panel.tell("Asking the server…");
      this.panel.tell(await run());
    } catch (error) {
      this.panel.tell(error.message, true);
    }
    this.#refreshed_ms = -Infinity;
    this.onChange();
  }

  onPin(place) {
    const pin = this.#nodeOf(place)?.pinned && this.commands.pinOf(place);
    return pin ? this.onUnpin(pin) : this.#command(() => this.commands.pin(place));
  }

  onUnpin(pin) {
    return this.#command(() => this.commands.unpin(pin));
  }

  onEvict(place) {
    return this.#command(() => this.commands.evict(place));
  }

  togglePin() {
    byId("node").dataset.node !== "" && this.panel.pin.click();
  }

  evict() {
    byId("node").dataset.node !== "" && this.panel.evict.click();
  }

  // ---- how it looks

  rem() {
    return this.palette.rem;
  }

  get palette() {
    return (this.#palette ??= paletteOf(this.#isDark() ? "dark" : "light", this.colouring));
  }

  #isDark() {
    if (this.theme !== "auto") return this.theme === "dark";
    return matchMedia("(prefers-color-scheme: dark)").matches;
  }

  textOf(node) {
    return this.texts && node.text ? node.text.replace(/\s+/g, " ").trim() : "";
  }

  labelOf(node) {
    return this.textOf(node) || node.module || plural(node.tokens, "token");
  }

  setTheme(theme) {
    this.theme = theme;
    localStorage.setItem("relay-theme", theme);
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    say(byId("theme"), `Theme: ${theme}`);
    this.#repaint();
  }

  nextTheme() {
    this.setTheme(THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length]);
  }

  setColouring(name) {
    this.colouring = name;
    for (const input of document.getElementsByName("colouring"))
      input.checked = input.value === name;
    this.#repaint();
  }

  nextColouring() {
    const names = Object.keys(COLOURINGS);
    this.setColouring(names[(names.indexOf(this.colouring) + 1) % names.length]);
  }

  // Texts that are hidden are not sent either.
  setTexts(shown) {
    this.texts = shown;
    byId("texts").checked = shown;
    localStorage.setItem("relay-texts", shown ? "shown" : "hidden");
    if (!this.recording) this.feed.start({ texts: shown });
    this.#refreshed_ms = -Infinity;
    this.onChange();
  }

  toggleTexts() {
    this.setTexts(!this.texts);
  }

  help() {
    byId("help-dialog").showModal();
  }

  #repaint() {
    this.#palette = null;
    const { ramp } = this.palette;
    const { ends } = COLOURINGS[this.colouring];
    const steps = ramp.map((colour) => {
      const step = element("i");
      step.style.background = colour;
      return step;
    });
    byId("ramp").replaceChildren(ends[0], ...steps, ends[1]);
    this.onChange();
  }

  #listen() {
    for (const input of document.getElementsByName("colouring"))
      input.addEventListener("change", () => this.setColouring(input.value));
    byId("texts").addEventListener("change", (event) => this.setTexts(event.target.checked));
    byId("theme").addEventListener("click", () => this.nextTheme());
    byId("help").addEventListener("click", () => this.help());
    byId("pause").addEventListener("click", () => this.togglePause());
    byId("live").addEventListener("click", () => this.goLive());
    byId("key-dialog").addEventListener("close", () => {
      keepApiKey(byId("key").value);
      byId("key").value = "";
      this.feed.start({ texts: this.texts });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#repaint());
    window.addEventListener("resize", () => this.#repaint());
  }

  // ---- the screen

  #showState(state) {
    const before = this.state.kind;
    this.state = state;
    if (state.kind === "key") {
      say(byId("key-reason"), state.reason);
      if (!byId("key-dialog").open) byId("key-dialog").showModal();
    }
    if (state.kind !== before) this.#refreshed_ms = -Infinity;
    this.onChange();
  }

  onChange() {
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    this.#advance();
    const { timeline, columns, palette } = this;
    const due_ms = this.#refreshed_ms + REFRESH_MS - performance.now();
    if (due_ms <= 0) this.#refresh();
    else setTimeout(() => this.onChange(), due_ms);
    columns.draw(palette, {
      step: COLOURINGS[this.colouring].step,
      labelOf: (node) => this.labelOf(node),
      nowOf: (forest) => this.#nowOf(forest),
      marksOf: (forest) => this.#marksOf(forest),
    });
    if (this.#played || columns.icicles.some(({ icicle }) => icicle.moving)) this.onChange();
    this.scrubber.show(timeline, {
      shown_s: this.#shown_s,
      recorded: Boolean(this.recording),
    });
  }

  #marksOf(forest) {
    const marks = {};
    for (const [name, place] of Object.entries(this.#places))
      marks[name] = place?.source === forest.id ? this.#nodeOf(place) : null;
    return marks;
  }

  #refresh() {
    this.#refreshed_ms = performance.now();
    const { timeline, columns, panel, palette } = this;
    const forests = [...timeline.forests.values()];
    columns.show(timeline.forests);
    showFigures(summarize(forests.map(({ stats }) => stats)));
    this.scrubber.draw(timeline, palette.chart);
    const place = this.#places.selected;
    const node = this.#nodeOf(place);
    const forest = node && timeline.forests.get(place.source);
    const problem = this.#problem;
    panel.showNode(
      node && {
        place,
        node,
        forest,
        now_s: this.#nowOf(forest),
        pin: this.commands.pinOf(place),
        problem,
        several: forests.length > 1,
      },
    );
    if (place && !node) panel.tell(`Prefix ${place.id} is no longer cached.`);
    panel.showLists(forests, this.commands.pins, problem);
    this.#showTop();
  }

  #showTop() {
    const { timeline, state, hello } = this;
    say(byId("model"), hello?.model ?? "");
    const kind = state.kind === "live" && !timeline.following ? "paused" : state.kind;
    const states = {
      connecting: "Connecting",
      live: "Live",
      paused: "Paused",
      lost: `Connection lost: ${state.reason}. Trying again`,
      key: "Waiting for the API key",
      off: "Not available",
      recording: this.#played ? "Replaying" : "Recording",
    };
    byId("state").dataset.kind = kind;
    say(byId("state"), states[kind]);
    const stands = this.recording ? !this.#played : !timeline.following;
    say(byId("pause"), stands ? "Go on" : "Pause");
    set(byId("live"), "disabled", this.recording ? this.#atEnd : timeline.following);
    say(byId("live"), this.recording ? "End" : "Live");
    const nodes = [...timeline.forests.values()].reduce((sum, { nodes }) => sum + nodes.size, 0);
    emptyState(byId("empty"), nodes, this);
  }

  #showTip(place, event) {
    const tip = byId("tip");
    const node = this.#nodeOf(place);
    set(tip, "hidden", !node);
    if (!node) return;
    const text = this.labelOf(node);
    const facts = [
      plural(node.tokens, "token"),
      plural(node.hits, "hit"),
      node.running && `${node.running} running`,
      node.shared > 1 && `read once for ${node.shared}`,
    ];
    tip.replaceChildren(
      element("p", { textContent: text.length > 240 ? `${text.slice(0, 240)}…` : text }),
      element("p", { textContent: facts.filter(Boolean).join(" · ") }),
    );
    const { icicle } = this.columns.of(place.source);
    const canvas = icicle.canvas.getBoundingClientRect();
    const box = icicle.boxOf(node, this.rem());
    const x = event ? event.clientX + 14 : canvas.left + Math.max(0, box.x);
    const y = event ? event.clientY + 18 : canvas.top + box.y + box.height + 6;
    const { offsetWidth, offsetHeight } = tip;
    tip.style.left = `${Math.max(4, Math.min(x, innerWidth - offsetWidth - 8))}px`;
    tip.style.top = `${y + offsetHeight > innerHeight ? y - offsetHeight - 30 : y}px`;
  }
}

new Page();

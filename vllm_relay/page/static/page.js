// SPDX-License-Identifier: Apache-2.0
// The page: what comes from the feed goes to the timeline, and what that shows to the screen.

import { Commands } from "./data/commands.js";
import { Feed, keepApiKey, recordedEvents } from "./data/feed.js";
import { FeedError } from "./data/forest.js";
import { Playback } from "./data/playback.js";
import { Timeline, summarize } from "./data/timeline.js";
import { byId, say, set } from "./dom.js";
import { listenToKeys } from "./keys.js";
import { Selection } from "./selection.js";
import { Columns } from "./view/columns.js";
import { showFigures } from "./view/figures.js";
import { Look } from "./view/look.js";
import { Panel } from "./view/panel.js";
import { Scrubber } from "./view/scrubber.js";
import { emptyState } from "./view/states.js";

const REFRESH_MS = 250; // of what is no canvas

class Page {
  hello = null;
  state = { kind: "connecting" };
  recording = new URLSearchParams(location.search).get("replay");
  commands = new Commands();
  selection = new Selection(this);
  #ahead_s = 0; // of the server's clock before ours
  #frame = 0;
  #refresh_timer = 0;
  #refreshed_ms = -Infinity;
  #pinnedBlocks = new Map(); // of each source

  constructor() {
    this.#holdTimeline(new Timeline(this.recording ? Infinity : undefined));
    this.feed = new Feed(
      (event) => this.#take(event),
      (state) => this.#showState(state),
    );
    this.look = new Look({
      onChange: () => this.#changeAll(),
      onTexts: (shown) => this.#showTexts(shown),
    });
    this.columns = new Columns(this);
    this.panel = new Panel(this);
    this.scrubber = new Scrubber({ onSeek: (t) => this.playback.seek(t) });
    this.#listen();
    if (this.recording) this.#openRecording();
    else this.feed.start({ texts: this.look.texts });
    setInterval(() => this.onChange(), 1000); // ages
  }

  #holdTimeline(timeline) {
    this.timeline = timeline;
    this.playback = new Playback(timeline, {
      recorded: this.recording !== null,
      onChange: () => this.onChange(),
      onError: (error) => this.#beginAnew(error),
    });
  }

  // What is told does not fit what was told before: only a new snapshot helps.
  #beginAnew(error) {
    if (!(error instanceof FeedError)) throw error;
    this.#holdTimeline(new Timeline());
    if (this.recording) this.#showState({ kind: "off", reason: error.message });
    else this.feed.start({ texts: this.look.texts });
  }

  #listen() {
    const { selection, look } = this;
    byId("help").addEventListener("click", () => byId("help-dialog").showModal());
    byId("pause").addEventListener("click", () => this.playback.toggle());
    byId("live").addEventListener("click", () => this.playback.goLive());
    byId("state").addEventListener("click", () => this.#askKey());
    byId("key-dialog").addEventListener("close", () => {
      if (!byId("key").value) return;
      keepApiKey(byId("key").value);
      byId("key").value = "";
      this.feed.start({ texts: look.texts });
    });
    listenToKeys({
      ArrowUp: () => selection.walk("up"),
      ArrowDown: () => selection.walk("down"),
      ArrowLeft: () => selection.walk("left"),
      ArrowRight: () => selection.walk("right"),
      Enter: () => selection.nodeOf(selection.focused) && this.onSelect(selection.focused),
      z: () => this.onZoom(selection.focused ?? selection.selected),
      Escape: () => this.#leave(),
      p: () => this.panel.place && this.panel.pin.click(),
      e: () => this.panel.place && this.panel.evict.click(),
      " ": () => this.playback.toggle(),
      ",": () => this.playback.step(-1),
      ".": () => this.playback.step(1),
      Home: () => this.playback.goLive(),
      c: () => look.nextColouring(),
      t: () => look.toggleTexts(),
      d: () => look.nextTheme(),
      k: () => this.#askKey(),
      "?": () => byId("help-dialog").showModal(),
    });
  }

  // ---- what comes in

  #take({ event, data }) {
    const now_s = Date.now() / 1000;
    if (event === "hello") {
      this.hello = data;
      this.timeline.setSources(now_s, data.sources);
      this.#pinnedBlocks.clear();
    } else {
      if (data.time_s) this.#ahead_s = data.time_s - now_s;
      try {
        this.timeline.push(now_s, event, data);
      } catch (error) {
        this.#holdTimeline(new Timeline());
        throw error; // and the feed is asked again
      }
      const pinned = data.stats?.memory_blocks.pinned;
      if (pinned !== this.#pinnedBlocks.get(data.source)) {
        this.#pinnedBlocks.set(data.source, pinned);
        this.#readPins();
      }
    }
    this.onChange();
  }

  // A server whose scheduler has no pins says so; then there are none.
  #readPins() {
    this.commands.readPins().then(
      () => this.onChange(),
      () => {},
    );
  }

  async #openRecording() {
    try {
      for (const { t, event, data } of await recordedEvents(this.recording)) {
        if (event === "hello") {
          this.hello = data;
          this.timeline.setSources(t, data.sources);
        } else {
          this.timeline.push(t, event, data);
        }
      }
      this.#showState({ kind: "recording" });
      this.playback.play(this.timeline.oldest_s);
    } catch (error) {
      this.#showState({ kind: "off", reason: error.message });
    }
  }

  #nowOf(forest) {
    const { following } = this.timeline;
    return following ? Date.now() / 1000 + this.#ahead_s : forest.time_s;
  }

  // ---- what the user does

  rem() {
    return this.look.palette.rem;
  }

  onHover(place, event) {
    this.selection.hover(place, event);
  }

  onFocus(source) {
    this.selection.enter(source);
  }

  onSelect(place, reveals = false) {
    this.panel.tell("");
    this.selection.select(place);
    if (reveals) this.selection.reveal(place);
    this.#changeAll();
  }

  onZoom(place) {
    if (this.selection.nodeOf(place)) this.columns.zoomTo(place);
  }

  #leave() {
    this.selection.hideTip();
    const zoomed = this.columns.icicles.filter(({ icicle }) => icicle.zoomed);
    for (const { icicle } of zoomed) icicle.zoomTo(null, this.rem());
    if (!zoomed.length) this.onSelect(null);
    this.onChange();
  }

  onPin(place) {
    const pin = this.selection.nodeOf(place)?.pinned_tokens && this.commands.pinOf(place);
    return pin ? this.onUnpin(pin) : this.#command(() => this.commands.pin(place));
  }

  onUnpin(pin) {
    return this.#command(() => this.commands.unpin(pin));
  }

  onEvict(place) {
    return this.#command(() => this.commands.evict(place));
  }

  // why the server cannot be asked to change anything now
  get #problem() {
    if (this.recording) return "This is a recording.";
    if (!this.timeline.following) return "Go back to now first (Home).";
    return this.state.kind === "live" ? "" : "The server cannot be reached now.";
  }

  async #command(run) {
    try {
      this.panel.tell("Asking the server…");
      this.panel.tell(await run());
    } catch (error) {
      this.panel.tell(error.message, true);
    }
    this.#changeAll();
  }

  // Those that are hidden are not sent either.
  #showTexts(shown) {
    this.selection.hideTip();
    if (!this.recording) this.feed.start({ texts: shown });
  }

  // ---- the screen

  #showState(state) {
    this.state = state;
    this.#askKey();
    this.#changeAll();
  }

  #askKey() {
    if (this.state.kind !== "key") return;
    say(byId("key-reason"), this.state.reason);
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  }

  #changeAll() {
    this.#refreshed_ms = -Infinity;
    this.onChange();
  }

  onChange() {
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    const runs = this.playback.advance();
    const { timeline, columns, look, playback } = this;
    const wait_ms = this.#refreshed_ms + REFRESH_MS - performance.now();
    clearTimeout(this.#refresh_timer);
    if (wait_ms <= 0) this.#refresh();
    else this.#refresh_timer = setTimeout(() => this.onChange(), wait_ms);
    columns.draw(look.palette, {
      step: look.step,
      labelOf: (node) => look.labelOf(node),
      nowOf: (forest) => this.#nowOf(forest),
      marksOf: (forest) => this.selection.marksOf(forest),
    });
    this.scrubber.show(timeline, playback);
    if (runs || columns.icicles.some(({ icicle }) => icicle.moving)) this.onChange();
  }

  #refresh() {
    this.#refreshed_ms = performance.now();
    const { timeline, columns, panel, look, selection } = this;
    const forests = [...timeline.forests.values()];
    columns.show(timeline.forests, timeline.shown_s);
    selection.refreshTip();
    showFigures(summarize(forests.map(({ stats }) => stats)));
    this.scrubber.draw(timeline, look.palette.chart);
    const place = selection.selected;
    const node = selection.nodeOf(place);
    const forest = node && timeline.forests.get(place.source);
    const problem = this.#problem;
    panel.showNode(
      node && {
        place,
        node,
        forest,
        problem,
        now_s: this.#nowOf(forest),
        pin: this.commands.pinOf(place),
        several: forests.length > 1,
      },
    );
    if (place && !node && !panel.told) panel.tell("The prefix that was selected is not cached.");
    panel.showLists(forests, this.commands.pins, problem);
    this.#showTop(forests);
  }

  #showTop(forests) {
    const { timeline, state, hello, look, playback } = this;
    say(byId("model"), hello?.model ?? "");
    const kind = state.kind === "live" && !timeline.following ? "paused" : state.kind;
    const states = {
      connecting: "Connecting",
      live: "Live",
      paused: "Paused",
      lost: `Connection lost: ${state.reason}. Trying again`,
      key: "Waiting for the API key (K)",
      off: "Not available",
      recording: playback.stands ? "Recording" : "Replaying",
    };
    byId("state").dataset.kind = kind;
    say(byId("state"), states[kind]);
    const unsent = look.texts && hello?.texts === false;
    byId("texts").parentElement.title = unsent
      ? "This server sends no texts: it has no API key."
      : "Show texts (T)";
    byId("texts").parentElement.classList.toggle("unsent", unsent);
    say(byId("pause"), playback.stands ? "Go on" : "Pause");
    set(byId("live"), "disabled", this.recording ? playback.atEnd : timeline.following);
    say(byId("live"), this.recording ? "End" : "Live");
    const nodes = forests.reduce((sum, { nodes }) => sum + nodes.size, 0);
    emptyState(byId("empty"), nodes, this);
  }
}

new Page();

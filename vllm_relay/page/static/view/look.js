// SPDX-License-Identifier: Apache-2.0
// Theme, colouring and whether texts are shown: the switches at the top, and what is drawn with.

import { COLOURINGS, paletteOf } from "./colours.js";
import { byId, element, say } from "../dom.js";
import { plural } from "../format.js";

const THEMES = ["auto", "light", "dark"];
const DARK = matchMedia("(prefers-color-scheme: dark)");

export class Look {
  colouring = "hits";
  texts = localStorage.getItem("relay-texts") !== "hidden";
  theme = localStorage.getItem("relay-theme") ?? "auto";
  #palette = null;

  // onTexts(shown): hidden texts need not be sent
  constructor({ onChange, onTexts }) {
    this.onChange = onChange;
    this.onTexts = onTexts;
    for (const input of document.getElementsByName("colouring"))
      input.addEventListener("change", () => this.setColouring(input.value));
    byId("texts").checked = this.texts;
    byId("texts").addEventListener("change", (event) => this.setTexts(event.target.checked));
    byId("theme").addEventListener("click", () => this.nextTheme());
    DARK.addEventListener("change", () => this.#repaint());
    window.addEventListener("resize", () => this.#repaint());
    this.setTheme(this.theme);
  }

  get palette() {
    const dark = this.theme === "auto" ? DARK.matches : this.theme === "dark";
    const theme = dark ? "dark" : "light";
    if (this.#palette?.theme !== theme) this.#palette = null;
    if (!this.#palette) {
      this.#palette = paletteOf(theme, this.colouring);
      this.#showRamp(this.#palette.ramp);
    }
    return this.#palette;
  }

  get step() {
    return COLOURINGS[this.colouring].step;
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

  setTexts(shown) {
    this.texts = shown;
    byId("texts").checked = shown;
    localStorage.setItem("relay-texts", shown ? "shown" : "hidden");
    this.onTexts(shown);
    this.onChange();
  }

  toggleTexts() {
    this.setTexts(!this.texts);
  }

  #repaint() {
    this.#palette = null;
    this.onChange();
  }

  #showRamp(ramp) {
    const { ends } = COLOURINGS[this.colouring];
    const steps = ramp.map((colour) => {
      const step = element("i");
      step.style.background = colour;
      return step;
    });
    byId("ramp").replaceChildren(ends[0], ...steps, ends[1]);
  }
}

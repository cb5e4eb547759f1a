// SPDX-License-Identifier: Apache-2.0
// What keys do, wherever no button, field or dialog wants them.

const WANTS_KEYS = "input:not([type=radio], [type=checkbox]), select, textarea, [contenteditable]";

export function listenToKeys(page) {
  const keys = {
    ArrowUp: () => page.walk("up"),
    ArrowDown: () => page.walk("down"),
    ArrowLeft: () => page.walk("left"),
    ArrowRight: () => page.walk("right"),
    Enter: () => page.selectFocused(),
    z: () => page.zoomToFocused(),
    Escape: () => page.leave(),
    p: () => page.togglePin(),
    e: () => page.evict(),
    " ": () => page.togglePause(),
    ",": () => page.step(-1),
    ".": () => page.step(1),
    Home: () => page.goLive(),
    c: () => page.nextColouring(),
    t: () => page.toggleTexts(),
    d: () => page.nextTheme(),
    "?": () => page.help(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]") || event.target.matches(WANTS_KEYS)) return;
    const { key, target } = event;
    if ((key === " " || key === "Enter") && target.matches("button, input")) return;
    if (key.startsWith("Arrow") && target.matches("input")) return;
    const act = keys[key.length === 1 ? key.toLowerCase() : key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

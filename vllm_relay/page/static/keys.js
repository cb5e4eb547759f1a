// SPDX-License-Identifier: Apache-2.0
// What keys do, wherever no button, field or dialog wants them.

const FIELDS = "input:not([type=radio], [type=checkbox], [type=range])";
const PRESSED = "button, input:not([type=range])";

// keys: what to do, by the key's name, letters in lower case
export function listenToKeys(keys) {
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]") || target.matches(FIELDS)) return;
    if ((key === " " || key === "Enter") && target.matches(PRESSED)) return;
    if (key.startsWith("Arrow") && target.matches("input")) return;
    const act = keys[key.length === 1 ? key.toLowerCase() : key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

// SPDX-License-Identifier: Apache-2.0
// What stands where no forest is: why, and what to do.

import { apiKey } from "../data/feed.js";
import { element, set } from "../dom.js";

const ASK = (
  model,
) => `curl ${location.origin}/v1/completions -H 'Content-Type: application/json' \\
${apiKey() ? `  -H "Authorization: Bearer $API_KEY" \\\n` : ""}\
  -d '${JSON.stringify({ model, prompt: "A long prompt that others begin with too", max_tokens: 8 })}'`;

const DEMO = "?replay=static/demo.jsonl";

// page: {state, hello, recording}
export function emptyState(target, nodes, { state, hello, recording }) {
  const found = nodes ? null : whatStands(state, hello, recording);
  set(target, "hidden", !found);
  const key = found ? found.join("\n") : "";
  if (target.dataset.said === key) return;
  target.dataset.said = key;
  const [title, text, code] = found ?? [];
  target.replaceChildren();
  if (!found) return;
  target.append(element("h2", { textContent: title }), element("p", { textContent: text }));
  if (code) target.append(element("pre", { textContent: code }));
  if (!recording) target.append(element("a", { href: DEMO, textContent: "See a recorded run" }));
}

function whatStands({ kind, reason }, hello, recording) {
  if (kind === "off" && recording) return ["This recording cannot be shown", reason];
  if (kind === "off") return ["This server has no live page", reason];
  if (kind === "key") return ["The API key is missing", "Press K to enter it."];
  if (kind === "lost") return ["The server cannot be reached", `${reason}. It is tried again.`];
  if (kind === "recording")
    return ["Nothing was cached at this moment", "Move on in the timeline."];
  if (kind === "live" && hello)
    return [
      "Nothing is cached yet",
      "Prefixes appear as soon as a request has filled its first block of " +
        `${hello.block_size_tokens} tokens. Send one:`,
      ASK(hello.model),
    ];
  return ["Connecting", "Asking the server for its prefixes."];
}

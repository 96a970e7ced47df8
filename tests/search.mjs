// The site's own search, run outside of a browser: node tests/search.mjs SITE pasted|typed < texts.json
//
// Each text is typed into the search box, or pasted, for which docs/assets/search.js listens, and what
// then is in the box is given to the worker of the theme that answers searches. Prints for each text
// the places that were found, best first, each a page and its best section.

import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [site, way] = process.argv.slice(2);
const index = readFileSync(join(site, "search", "search_index.json"), "utf8");

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", "#x27": "'", nbsp: " " };
const textOf = (html) =>
  html.replace(/<[^>]*>/g, "").replace(/&([#\w]+);/g, (all, name) => ENTITIES[name] ?? all);

// As much of a browser as search.js uses.
class HTMLInputElement {
  value = "";
  matches = () => true;
  dispatchEvent = () => true;
}
const listeners = {};
vm.runInNewContext(readFileSync(join(site, "assets", "search.js"), "utf8"), {
  HTMLInputElement,
  Event,
  KeyboardEvent: Event,
  DOMParser: class {
    parseFromString(html) {
      const codes = [...html.matchAll(/<code[^>]*>(.*?)<\/code>/gs)];
      return {
        body: { textContent: textOf(html) },
        querySelectorAll: () => codes.map(([, inner]) => ({ innerHTML: inner, textContent: textOf(inner) })),
      };
    }
  },
  document: {
    addEventListener: (name, listener) => (listeners[name] = listener),
    getElementById: () => ({ textContent: JSON.stringify({ base: "." }) }),
  },
  fetch: async () => ({ json: async () => JSON.parse(index) }),
});

async function pasted(text) {
  const target = new HTMLInputElement();
  let isReplaced = false;
  const clipboardData = { getData: () => text };
  await listeners.paste({ target, clipboardData, preventDefault: () => (isReplaced = true) });
  return isReplaced ? target.value : text.replaceAll("\n", "");
}

// The worker answers messages; the numbers are those of its protocol.
const [SETUP, QUERY] = [0, 2];
const workers = join(site, "assets", "javascripts", "workers");
const [worker] = readdirSync(workers).filter((name) => /^search\..*\.js$/.test(name));
let answered;
const scope = {
  console,
  addEventListener: (_, listener) => (scope.ask = (message) => listener({ data: message })),
  postMessage: (message) => (answered = message),
};
scope.self = scope;
vm.runInNewContext(readFileSync(join(workers, worker), "utf8"), scope);
await scope.ask({ type: SETUP, data: { ...JSON.parse(index), options: { suggest: false } } });

const found = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
  const query = way === "typed" ? text : await pasted(text);
  await scope.ask({ type: QUERY, data: query });
  const places = answered.data.items.map((group) => {
    const [section] = group.filter((item) => item.location.includes("#") && item.score > 0);
    return (section ?? group[0]).location;
  });
  found.push({ query, places });
}
console.log(JSON.stringify(found));

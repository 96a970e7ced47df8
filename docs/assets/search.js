// A pasted error message becomes the fixed words of that message on the page of errors, so that the
// search finds its section: ranks, names and punctuation of the reader's own would find other pages.
"use strict";

const GAP = "…";
const SHARE = 0.6; // of a message's fixed words; what was pasted may be a part of it
const FEWEST_WORDS = 2;
const PLACES = "errors/#where-a-rank-is"; // a part of many messages, and of none the point
// Search leaves these out of its index, and would take them for the beginnings of other words.
const COMMON = new Set(
  ("a an and any are as at be because been but by can could did do does either for from get had has " +
    "have he her him his how however i if in into is it its just least let like likely may me might " +
    "most must my neither no nor not of off often on only or other our own rather said say she should " +
    "since so some than that the their them then there these they this to too us wants was we were " +
    "what when where which while who whom why will with would yet you your").split(" "),
);

const wordsOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+|…/gu) || [];

const plain = (html) => new DOMParser().parseFromString(html, "text/html").body.textContent;

// The messages in a piece of HTML: whatever is set as code.
const messagesIn = (html) =>
  [...new DOMParser().parseFromString(html, "text/html").querySelectorAll("code")].map((code) =>
    wordsOf(code.textContent),
  );

// How many fixed words of a message a text has, unbroken between the gaps and in order.
function fixedWordsIn(words, message) {
  let at = 0;
  let count = 0;
  let piece = [];
  for (const word of [...message, GAP]) {
    if (word !== GAP) {
      piece.push(word);
      continue;
    }
    for (let start = at; piece.length && start + piece.length <= words.length; start++) {
      if (piece.every((each, offset) => words[start + offset] === each)) {
        count += piece.length;
        at = start + piece.length;
        break;
      }
    }
    piece = [];
  }
  return count;
}

// What to search for in place of a pasted text; the text itself, without punctuation, if unknown.
function queryFor(text, sections) {
  const words = wordsOf(text);
  let best = { count: 0, share: 0, query: words };
  for (const section of sections) {
    for (const { message, query } of section) {
      const fixed = message.filter((word) => word !== GAP).length;
      const count = fixedWordsIn(words, message);
      const share = count / fixed;
      const isBetter = count > best.count || (count === best.count && share > best.share);
      if (count >= FEWEST_WORDS && share >= SHARE && isBetter) best = { count, share, query };
    }
  }
  const kept = best.query.filter((word) => word !== GAP && !COMMON.has(word) && !/^\d+$/.test(word));
  return [...new Set(kept)].join(" ");
}

async function loadSections() {
  const { base } = JSON.parse(document.getElementById("__config").textContent);
  const index = await (await fetch(`${base}/search/search_index.json`)).json();
  return index.docs
    .filter((section) => section.location.startsWith("errors/#") && section.location !== PLACES)
    .map(({ title, text }) => {
      const heading = wordsOf(plain(title));
      return [
        ...messagesIn(title).map((message) => ({ message, query: message })),
        ...messagesIn(text).map((message) => ({ message, query: [...heading, ...message] })),
      ];
    });
}

let sections; // loaded with the first paste

document.addEventListener("paste", async (event) => {
  const box = event.target;
  if (!(box instanceof HTMLInputElement) || !box.matches("[data-md-component=search-query]")) return;
  const text = event.clipboardData.getData("text");
  if (wordsOf(text).length <= FEWEST_WORDS) return;
  event.preventDefault();
  sections ??= loadSections().catch(() => []);
  box.value = queryFor(text, await sections);
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
});

// A pasted error message becomes the fixed words of that message on the page of errors, so that the
// search finds its section: ranks, names and punctuation of the reader's own would find other pages.
"use strict";

const GAP = "…";
const SHARE = 0.6; // of a message's fixed words; what was pasted may be a part of it
const FEWEST_WORDS = 2;
const ERRORS = /^errors\/.*#/; // the sections of the pages of errors
const PLACES = /#where-a-rank-is$/; // a part of many messages, and of none the point
// Search leaves these out of its index.
const COMMON = new Set(
  (
    "a able about across after all almost also am among an and any are as at be because been " +
    "but by can cannot could dear did do does either else ever every for from get got had has " +
    "have he her hers him his how however i if in into is it its just least let like likely " +
    "may me might most must my neither no nor not of off often on only or other our own " +
    "rather said say says she should since so some than that the their them then there these " +
    "they this tis to too twas us wants was we were what when where which while who whom why " +
    "will with would yet you your"
  ).split(" "),
);

// A word that goes on in a gap, as group_… does, belongs to it.
const wordsOf = (text) =>
  text.replace(/\w+_…/g, GAP).toLowerCase().match(/[\p{L}\p{N}_]+|…/gu) || [];

// The pieces of a message between its gaps.
const piecesOf = (message) => message.join(" ").split(GAP).map((piece) => piece.trim()).filter(Boolean);

// The messages in a piece of HTML, which are set as code: each with what it may be pasted as, which is
// the whole, or what stands before its advice.
const messagesIn = (html) =>
  [...new DOMParser().parseFromString(html, "text/html").querySelectorAll("code")].map((code) => {
    const text = code.textContent;
    const forms = [text, text.split("; ")[0]].map((form) => {
      const words = wordsOf(form);
      return { pieces: piecesOf(words), fixed: words.filter((word) => word !== GAP).length };
    });
    return { html: code.innerHTML, forms, isFrame: text.endsWith(GAP) };
  });

// How many words of a message's pieces a text has, each piece unbroken and all in order. What is left
// of the text is what stands behind the last of them.
function fixedWordsIn(words, pieces) {
  const text = ` ${words.join(" ")} `;
  const known = new Map();
  const from = (at, index) => {
    if (index === pieces.length) return { count: 0, end: at };
    const key = at * pieces.length + index;
    if (known.has(key)) return known.get(key);
    let best = from(at, index + 1);
    const start = text.indexOf(` ${pieces[index]} `, at);
    if (start >= 0) {
      const rest = from(start + pieces[index].length + 1, index + 1);
      const count = rest.count + pieces[index].split(" ").length;
      if (count > best.count) best = { count, end: rest.end };
    }
    known.set(key, best);
    return best;
  };
  const { count, end } = from(0, 0);
  return { count, left: text.slice(end).trim().split(" ").filter(Boolean) };
}

// The words of a piece of HTML as the search counts them: what it splits and leaves out is no word.
const termsOf = (html, separator) =>
  new Set(
    html
      .replace(/<[^>]*>/g, " ")
      .toLowerCase()
      .split(separator)
      .filter((term) => /^[\p{L}_][\p{L}\p{N}_.]*$/u.test(term) && !COMMON.has(term)),
  );

const hasAll = (terms, wanted) => [...wanted].every((term) => terms.has(term));

// A query for one section: all terms in quotes must be there, and none with a minus. Other pages, which
// come before the pages of errors, must not be found; nor must another error whose heading has all terms
// and more, which the search does not count.
function queryFor({ section, terms }, sections) {
  const inTitle = [...terms].filter((term) => section.title.has(term));
  const excluded = [];
  let left = sections.filter(
    ({ isError, title, all }) =>
      all !== section.all && hasAll(all, terms) && !(isError && !hasAll(title, inTitle)),
  );
  for (;;) {
    const counts = new Map(); // the fewest words that keep all of them out
    for (const { all } of left) {
      for (const term of all) if (!section.all.has(term)) counts.set(term, (counts.get(term) ?? 0) + 1);
    }
    if (!counts.size) break;
    const [most] = [...counts].reduce((one, other) => (other[1] > one[1] ? other : one));
    excluded.push(most);
    left = left.filter(({ all }) => !all.has(most));
  }
  return [`"${[...terms].join(" ")}"`, ...excluded.map((term) => `-${term}`)].join(" ");
}

// Of two messages that a text may be the better: more of it, then more words.
const isBetter = (one, other) =>
  one.isPoint !== other.isPoint
    ? one.isPoint
    : one.value > other.value || (one.value === other.value && one.count > other.count);

// The message that a text is, or none. Where one ends in a gap, what fills it may be a message, too:
// that one says more.
function recognised(words, messages) {
  let best = { isPoint: false, value: 0, count: 0 };
  for (const message of messages) {
    for (const { pieces, fixed } of message.forms) {
      const { count, left } = fixedWordsIn(words, pieces);
      if (count < FEWEST_WORDS || count < SHARE * fixed) continue;
      const found = { isPoint: message.isPoint, value: (count * count) / fixed, count, left, message };
      if (isBetter(found, best)) best = found;
    }
  }
  if (!best.message?.isFrame) return best;
  const inner = recognised(best.left, messages);
  return inner.isPoint ? inner : best;
}

const isTelling = (word) => word !== GAP && !COMMON.has(word) && !/^\d+$/.test(word);

// The message that has most of a text's words, if it has half of them, or none: of one that was pasted in
// part, or that differs from the page. Gives its section, and those words.
function resembling(words, messages) {
  const at = words.slice(0, 2).indexOf("objcomm"); // as in "[rank3]: objcomm.UsageError: "
  const own = new Set(words.slice(at < 0 ? 0 : at + 2).filter(isTelling));
  let best = { value: 0 };
  for (const { section, forms } of messages) {
    const telling = new Set(forms[0].pieces.flatMap((piece) => piece.split(" ")).filter(isTelling));
    const terms = new Set([...telling].filter((word) => own.has(word) && section.all.has(word)));
    const value = (terms.size * terms.size) / telling.size;
    if (terms.size >= FEWEST_WORDS && 2 * terms.size >= own.size && value > best.value) {
      best = { value, section, terms };
    }
  }
  return best.section && best;
}

// What to search for in place of a pasted text; the text itself, without punctuation, if unknown.
function searchFor(text, { sections, messages }) {
  const words = wordsOf(text);
  const found = recognised(words, messages).message ?? resembling(words, messages);
  return found ? queryFor(found, sections) : [...new Set(words.filter(isTelling))].join(" ");
}

async function loadKnown() {
  const { base } = JSON.parse(document.getElementById("__config").textContent);
  const { config, docs } = await (await fetch(`${base}/search/search_index.json`)).json();
  const separator = new RegExp(config.separator, "g");
  const known = { sections: [], messages: [] };
  const inTexts = []; // after those in headings, which explain what others mention
  for (const { location, title, text } of docs) {
    const isError = ERRORS.test(location);
    const section = {
      isError,
      title: termsOf(title, separator),
      all: termsOf(`${title} ${text}`, separator),
    };
    known.sections.push(section);
    if (!isError) continue;
    const isPoint = !PLACES.test(location);
    for (const message of messagesIn(title)) {
      known.messages.push({ ...message, section, isPoint, terms: termsOf(message.html, separator) });
    }
    for (const message of messagesIn(text)) {
      const terms = new Set([...section.title, ...termsOf(message.html, separator)]);
      inTexts.push({ ...message, section, isPoint, terms });
    }
  }
  known.messages.push(...inTexts);
  // A message without a word that counts cannot be searched for.
  known.messages = known.messages.filter(({ section, terms }) => terms.size && hasAll(section.all, terms));
  return known;
}

let known; // loaded with the first paste

document.addEventListener("paste", async (event) => {
  const box = event.target;
  if (!(box instanceof HTMLInputElement) || !box.matches("[data-md-component=search-query]")) return;
  const text = event.clipboardData.getData("text");
  if (wordsOf(text).length <= FEWEST_WORDS) return;
  event.preventDefault();
  known ??= loadKnown().catch(() => ({ sections: [], messages: [] }));
  box.value = searchFor(text, await known);
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
});

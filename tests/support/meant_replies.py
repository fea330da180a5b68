"""Judge replies whose meaning is known.

First a meaning is drawn: verdicts, citations or criteria. A style (`HONEST`) is a way in which judges write it; an
adversary (`ADVERSARIES`) makes the reply say something else, too, so that its meaning is unknown, or only the last of
two answers counts. In templates ``@`` stands for the text that they surround.
"""

# ruff: noqa: SIM905 (lists of short forms read best as one text)

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from draco_ray.records import Verdict

STEPS = 6
TITLES = (
    "Reads all pages|Keeps secrets|Completes the task|Handles errors|Uses the right account|Never invents values"
    "|Scores are saved|Verdict is reported|Fails early|Passes the token on|Reads page 1|Reads page 10|Handles C++"
    '|Reads all pages twice|Zahlt den richtigen Betrag|读取所有页面|Asks "are you sure?" first|Uses a -1 index'
).split("|")
SAID = {
    1: "Step 2 shows it.|PASS: all of it is there.|No failure occurred, and it never failed to log in.||满足要求。"
    "|It meets the criterion.|The verdict is PASS because of step 2.|So the score is 1.|0 of 5 calls to page -1 fail.",
    -1: "It should have read on.|FAIL: step 4 is missing.|It claims success, but nothing shows it.||不满足要求。"
    "|It should have passed page_index=1.|Therefore the score is -1.|It wrote 'all pass'; the score is \u22121.",
    0: "The situation never arose.|N/A|Not applicable: no error occurred.|The verdict is NOT_APPLICABLE.||不适用。",
}
QUOTED = (
    'step 3||It printed {"score": 1, "ok": true}|[{"rubric_index": 0, "score": 1, "verdict": "PASS"}]|FAIL: test_refund'
    '|"score": 1|verdict: PASS|<think>go on</think> [1, 2]|```json\n[1]\n```|C:\\temp\\x|"}], "score": -1|“ok” ✓\ta'
).split("|")
LAYOUTS = (("{", ",", ":", "}"), ("{", ", ", ": ", "}"), ("{\n  ", ",\n  ", ": ", "\n}"), ("  {\n    ", ", ", ":", "}"))
COURTESIES = (
    "Let me know if you need anything else.\nI hope this helps!\nThank you.\nDone.\nThat is all.\n---\n```\n</answer>"
    "\n<|im_end|>\nEnd of evaluation.\nPlease let me know if you need further clarification."
).split("\n")

Entry = dict[str, str]
"""Field name -> value as JSON text."""
Meaning = list[tuple[object, ...]]
"""Verdict and steps of each criterion, or title and instruction of each proposed criterion."""


@dataclass(slots=True)
class Reply:
    draw: random.Random
    phase: str
    titles: list[str]
    verdicts: list[int]
    layout: tuple[str, str, str, str]
    entries: list[Entry] = field(default_factory=list)
    meant: Meaning = field(default_factory=list)
    join: tuple[str, str, str] = ("@", ", ", "[@]")
    """Text around an entry, between two entries, and around all entries."""
    shuffled: bool = False
    edits: list[Callable[[str], str]] = field(default_factory=list)
    """Changes of the text, the inner ones first."""

    def say(self, place: int, title: str, verdict: int) -> None:
        """Set the entry and the meaning at ``place``."""
        steps = sorted(self.draw.sample(range(1, STEPS + 1), self.draw.randint(1, 3))) if verdict else []
        said = self.draw.choice(SAID[verdict].split("|"))
        entry: dict[str, object] = {"rubric_index": place, "rubric_title": title}
        meant: tuple[object, ...] = (verdict, *steps)
        if self.phase == "score":
            entry |= {"score": verdict, "evidence": self.draw.choice(QUOTED), "justification": said}
            meant = (verdict,)
        elif self.phase == "credit":
            entry |= {"verdict": Verdict(verdict).name, "relevant_steps": steps, "explanation": said}
        else:
            meant = title, self.draw.choice(["Look at step 1.", "PASS if so, FAIL else.", "Give -1 where not."])
            entry = {"title": title, "description": "Of pages.", "evaluator_instruction": meant[1]}
        self.entries[place : place + 1] = [{name: quoted(value) for name, value in entry.items()}]
        self.meant[place : place + 1] = [meant]

    def text(self) -> str:
        opening, gap, colon, closing = self.layout
        each, between, around = self.join
        written = []
        for place, entry in enumerate(self.entries):
            criterion = place % len(self.titles)
            known = {"i": criterion, "n": criterion + 1, "t": self.titles[criterion]}
            known["said"] = self.draw.choice(SAID[self.verdicts[criterion]].split("|"))
            known["@"] = opening + gap.join(f'"{name}"{colon}{value}' for name, value in entry.items()) + closing
            written.append(filled(each, known))
        if self.shuffled:
            self.draw.shuffle(written)
        text = filled(around, {"@": between.join(written)})
        for edit in self.edits:
            text = edit(text)
        return text


Style = Callable[[Reply], None]
Adversary = Callable[[Reply], "Meaning | None"]


def quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def filled(template: str, known: Mapping[str, object]) -> str:
    return re.sub(r"\{(\w+)\}|@", lambda match: str(known.get(match[1] or "@", match[0])), template)


def drawn(
    draw: random.Random, phase: str, styles: Sequence[str], adversary: str | None
) -> tuple[str, list[str], Meaning | None]:
    """A reply's text, the titles of its criteria, and its meaning (None: unknown)."""
    verdicts = [draw.choice([-1, -1, 0, 1, 1]) for _ in range(draw.choice([2 if adversary in _OF_TWO else 1, 2, 3, 5]))]
    reply = Reply(draw, phase, draw.sample(TITLES, len(verdicts)), verdicts, draw.choice(LAYOUTS))
    for place, (title, verdict) in enumerate(zip(reply.titles, verdicts, strict=True)):
        reply.say(place, title, verdict)
    for style in sorted(styles, key=list(HONEST).index):
        HONEST[style](reply)
    meant = ADVERSARIES[phase][adversary](reply) if adversary else reply.meant
    if meant and phase == "criteria":
        meant = sorted(meant, key=str)
    return reply.text(), reply.titles, meant


# --- styles -----------------------------------------------------------------------------------------------------------


def _entries(change: Callable[[Reply, int, Entry], Entry]) -> Style:
    def style(reply: Reply) -> None:
        reply.entries = [change(reply, place, entry) for place, entry in enumerate(reply.entries)]

    return style


def _values(names: str, pattern: str, *forms: str) -> Style:
    """Replace a pattern by one of the forms, in every entry."""

    def style(reply: Reply) -> None:
        form = reply.draw.choice(forms)
        for entry in reply.entries:
            entry |= {n: re.sub(pattern, form, entry[n], flags=re.DOTALL) for n in entry if n in names.split()}

    return style


def _titles(change: Callable[[int, str], str]) -> Style:
    return _entries(
        lambda reply, place, entry: (
            entry | {name: quoted(change(place, reply.titles[place])) for name in entry if name == "rubric_title"}
        )
    )


def _without(names: str) -> Style:
    return _entries(lambda _, __, entry: {name: entry[name] for name in entry if name not in names.split()})


def _mixed(reply: Reply, entry: Entry) -> Entry:
    return dict(reply.draw.sample(list(entry.items()), len(entry)))


def _verdict_beside(reply: Reply, place: int, entry: Entry) -> Entry:
    return entry | ({"verdict": quoted(Verdict(reply.verdicts[place]).name)} if "score" in entry else {})


def _renamed(reply: Reply) -> None:
    rename = reply.draw.choice([str.upper, str.title, lambda name: name.replace("_", " ")])
    reply.entries = [{rename(name): value for name, value in entry.items()} for entry in reply.entries]


def _joined(*joins: tuple[str, str, str]) -> Style:
    return lambda reply: setattr(reply, "join", reply.draw.choice(joins))


def _edited(*changes: tuple[str, str]) -> Style:
    """Replace a pattern in the whole text; ``changes``: pairs of pattern and replacement, of which one is drawn."""

    def style(reply: Reply) -> None:
        pattern, form = reply.draw.choice(changes)
        reply.edits.append(lambda text: re.sub(pattern, form, text))

    return style


def _around(*templates: str) -> Style:
    def style(reply: Reply) -> None:
        template = reply.draw.choice(templates)
        reply.edits.append(lambda text: template.replace("@", text))

    return style


_FURTHER = (
    *(("confidence", "0.9"), ("notes", '"nothing"'), ("id", "7"), ("grounding_references", '["Step 1"]')),
    *(("evaluator_notes", "null"), ("reasoning", '"One could fail it for step 2, but it was asked to."')),
)
_TEXTS = "evidence justification explanation"
HONEST: dict[str, Style] = {
    "plain": lambda _: None,
    "numbers in quotes": _values("score rubric_index relevant_steps", r"-?\d+", r'"\g<0>"', r'" \g<0> "'),
    "scores in words?": _values("score", r"^-1$", '"FAIL"', '"-1 (fail)"', '"fail"'),
    "names in small letters": _entries(lambda _, __, each: each | {n: each[n].lower() for n in each if n == "verdict"}),
    "not applicable spelled": _values("verdict", "NOT_APPLICABLE", "N/A", " not applicable ", "Not-Applicable", "n/a"),
    "names marked?": _values("verdict", r'"(.*)"', r'"**\1**"', r'"\1."', r'"✅ \1"', r'"\1ED"'),
    "names as numbers?": _values("verdict", '"FAIL"', "-1", '"-1"'),
    "no steps as null": _values("relevant_steps", r"\[\]", "null"),
    "one step bare?": _values("relevant_steps", r"^\[(\d+)\]$", r"\1"),
    "steps named?": _values("relevant_steps", r"\d+", r'"step \g<0>"'),
    "steps as text?": _values("relevant_steps", r"^\[(.+)\]$", r'"\1"'),
    "steps twice": _values("relevant_steps", r"^\[(\d)(.*)\]$", r"[\1\2, \1]"),
    "steps of none": _values("relevant_steps", r"^\[\]$", "[1, 2]"),
    "titles marked": _values("rubric_title", r'^"(.*)"$', r'"\1."', r'"**\1**"', r'"  \1 "'),
    "titles in capitals": _titles(lambda _, title: title.upper()),
    "titles numbered": _titles(lambda place, title: f"{place + 1}. {title}"),
    "titles translated": _titles(lambda place, _: "Liest alle Seiten" + "读" * place),
    "texts null": _values(_TEXTS, r".+", "null"),
    "texts as lists": _values(f"{_TEXTS} description", r".+", r"[\g<0>]"),
    "no texts": _without(_TEXTS),
    "no index": _without("rubric_index"),
    "no title": _without("rubric_title"),
    "further fields": _entries(lambda reply, _, each: each | dict([reply.draw.choice(_FURTHER)])),
    "verdict beside": _entries(_verdict_beside),
    "reasoning in front": _entries(lambda _, __, each: {"reasoning": '"A pass needs an empty page."'} | each),
    "fields shuffled": _entries(lambda reply, _, each: _mixed(reply, each)),
    "entries shuffled": lambda reply: setattr(reply, "shuffled", True),
    "fields renamed?": _renamed,
    "words of Python?": _entries(lambda _, __, each: each | {"checked": "True"}),
    "lines": _joined(("@", "\n", "@"), ("@", ",\n", "@")),
    "a fence each": _joined(("```json\n@\n```", "\n\n", "@")),
    "a heading each": _joined(*((f"{each}\n@", "\n", "@") for each in ("### Criterion {n}", "**{t}**", "{n}. {t}"))),
    "a reason each?": _joined(("Criterion {i}: {said}\n@", "\n", "@")),
    "an array each?": _joined(("[@]", "\n", "@")),
    "by index?": _joined(('"{i}": @', ", ", "{@}")),
    "YAML?": _edited((r'[{}\[\]"]', "")),
    "commas missing?": _edited((r"\},(\s*)\{", r"}\1{")),
    "comments?": _edited((r"\}(\s*)\]$", r"} // done\n\1]"), (r"^", "/* scores */ "), (r"^\[", "[ # the scores\n")),
    "end missing?": _edited((r"\]$", "")),
    "other quotes?": _edited(('"', "'"), (r'"([^"\\]*)"', r"“\1”"), (r'"(\w+)":', r"\1:"), ('"', "&quot;")),
    "other space?": _edited(('":', '":\u00a0'), ("(?m)^ ", "\u00a0"), ('":', '":\u200b'), (r"\},", "},\u200b")),
    "other line ends": _edited(("\n", "\r\n")),
    "JSON in a string?": lambda reply: reply.edits.append(json.dumps),
    "wrapped": _around(
        *('{"scores": @}', '{"entries": @, "total": 3}', '{\n  "rubrics": @\n}', '{"task": "pay", "evaluations": @}'),
        *('{"results": @, "summary": "Each criterion was checked."}', "[@]"),
    ),
    "fence": _around(
        "```json\n@\n```", "```\n@\n```\n", "~~~JSON\n@\n~~~\n\n", "````python\n@\n````", "`@`", "\n @ \n"
    ),
    "twice": _around("@\n\n@"),
    "tag": _around("<answer>\n@\n</answer>", "<json>@</json>", "<final_answer>\n@\n</final_answer>"),
    "label": _around("Final answer:\n@", "**JSON:**\n@", "Output:\n@", "json\n@", "Final verdicts:\n@"),
    "prose in front": _around(
        *("Here is my evaluation:\n\n@", "Sure! As asked [1], {really}:\n@", "以下是评估结果：\n@"),
        *("The first one fails, I think, and the second passes.\n@", "Criterion 0: FAIL\nCriterion 1: PASS\n\n@"),
        *("Score: -1 for all at first sight; after a second look:\n@", "1. **Keeps secrets**: FAIL: it leaks.\n@"),
        *("| # | verdict |\n|---|---|\n| 0 | FAIL |\n\n@", "- [x] Handles C++\n- [ ] Pages\n\n@"),
    ),
    "quotation in front?": _around(
        *(
            'The API returned {"status": "ok"} in step 2.\n@',
            "It called show_x(pages=[]) once.\n@",
            "It got {} back.\n@",
        ),
        *('It sent {"a": [1, 2]} and got [].\n@', 'It printed [{"id": 3}] there.\n@', "It ran `x = {'a': 1}`.\n@"),
    ),
    "reasoning": _around(
        *("<think>hm</think>@", '<think>\nmaybe [{ or {"a": no\n</think>\n\n@', "The first fails? No.</think>\n@"),
        *('<think>[{"rubric_index": 0, "score": 1}]</think>@', "<think>the agent wrote <think>x</think>@"),
        *("<reasoning>Score: 1? -1!</reasoning>@", "[THINK]hm[/THINK]@", "<|channel|>analysis<|message|>hm<|end|>@"),
    ),
    "courtesy": _around(*(f"@{gap}{each}" for gap in ("\n\n", "\n", " ") for each in COURTESIES)),
    "prose behind": _around(
        *(
            "@\n\nSummary: 3 of 4 passed.",
            "@\n\nNote: criterion 3 was borderline.",
            "@\n\nBest regards,\nthe evaluator",
        ),
        *("@\n\nThe first one fails because step 2 is wrong; all others pass [see step 4].", "@\n\n总结：3/4 通过。"),
    ),
    "unseen edges": _around("\ufeff@", "\u200b@", "@\u200b", "\u2060@\ufeff"),
}
"""In the order in which they are applied. Names end in a question mark if the style is no plain JSON or is doubtful."""

# --- adversaries ------------------------------------------------------------------------------------------------------


def _say_other(reply: Reply) -> int:
    """Make one entry say something else; returns its place."""
    place = reply.draw.randrange(len(reply.titles))
    other = reply.draw.choice([each for each in (-1, 0, 1) if each != reply.verdicts[place]])
    reply.say(place, "Brand new" if reply.phase == "criteria" else reply.titles[place], other)
    return place


def _drafted(*templates: str) -> Adversary:
    """Put another answer in front, which the last one supersedes."""

    def adversary(reply: Reply) -> Meaning:
        reply.join = ("@", ", ", "[@]")
        draft = reply.text()
        _say_other(reply)
        template = reply.draw.choice(templates)
        reply.edits[:] = [lambda text: filled(template, {"draft": draft, "@": text})]
        return reply.meant

    return adversary


def _entries_amiss(reply: Reply) -> None:
    entries, place = list(reply.entries), reply.draw.randrange(len(reply.entries))
    match reply.draw.choice(["missing", "too many", "of both"] + ["in another's place"] * (len(entries) > 1)):
        case "missing":
            reply.entries.pop(place)
        case "too many":
            reply.entries.append(entries[-1] | {"rubric_index": str(len(entries)), "rubric_title": '"Something new"'})
        case "of both":
            place = _say_other(reply)
            reply.entries.insert(reply.draw.randint(0, len(entries)), entries[place])
        case _:
            reply.entries[place] = dict(entries[place - 1])


def _titles_exchanged(reply: Reply) -> None:
    form = reply.draw.choice(("{}", "{}.", "{}!", "“{}”", " {} "))
    first, second = reply.draw.sample(range(len(reply.titles)), 2)
    for place, other in ((first, second), (second, first)):
        title = quoted(form.format(reply.titles[other]))
        reply.entries[place] |= {"rubric_index": str(place), "rubric_title": title}


def _besides(reply: Reply, place: int, name: str, value: str) -> None:
    reply.entries[place] = _mixed(reply, reply.entries[place] | {name: value})


def _contradicted(reply: Reply) -> tuple[int, int]:
    """The place of an entry, and a verdict other than its own."""
    place = reply.draw.randrange(len(reply.titles))
    return place, -reply.verdicts[place] or reply.draw.choice([-1, 1])


def _field_twice(reply: Reply) -> None:
    """Add a different verdict under the same field name or a longer one."""
    place, other = _contradicted(reply)
    name, value = ("score", str(other)) if reply.phase == "score" else ("verdict", quoted(Verdict(other).name))
    _besides(reply, place, reply.draw.choice([name.upper(), f"{name}_final", f"new_{name}", f"{name}2"]), value)


def _around_last(*templates: str) -> Adversary:
    """Put another entry, or a part of one, beside the answer."""

    def adversary(reply: Reply) -> None:
        place, other = _contradicted(reply)
        entry: dict[str, object] = {"rubric_index": place, "rubric_title": reply.titles[place]}
        name = Verdict(other).name
        entry |= {"score": other} if reply.phase == "score" else {"relevant_steps": [6] * (other != 0), "verdict": name}
        known = {"entry": quoted(entry)}
        template = reply.draw.choice(templates)
        reply.join = ("@", ", ", "[@]")
        reply.edits.append(lambda text: filled(template, known | {"@": text}))

    return adversary


def _of_two_minds(reply: Reply) -> None:
    names, values = {
        "score": ("score", "-1 or 1|not 1|[1]|{}|&minus;1|true|0.5|1 // -1|1 (FAIL)"),
        "credit": (
            "verdict",
            "PASS/FAIL|PASS or FAIL|not PASS|!PASS|PARTIAL|PASS?||NOT_PASS|P|-PASS|PA\u200bSS|PASS\u0336",
        ),
        "criteria": ("title description evaluator_instruction", "null|3|true|{}"),
    }[reply.phase]
    value = reply.draw.choice(values.split("|"))
    reply.draw.choice(reply.entries)[reply.draw.choice(names.split())] = quoted(value) if names == "verdict" else value


def _cut(reply: Reply) -> None:
    """Cut the reply within an entry."""
    which, part, end = reply.draw.random(), reply.draw.random(), reply.draw.choice(["", "", "\n```", "..."])

    def cut(text: str) -> str:
        entries = [*re.finditer(r"\{[^{}]+", text)]
        entry = entries[int(which * len(entries))] if entries else None
        return (text[: entry.start() + 1 + int(part * (len(entry[0]) - 1))] if entry else "") + end

    reply.edits[:] = [cut]


_OF_ALL: dict[str, Adversary] = {
    "of two minds": _of_two_minds,
    "cut": _cut,
    "draft in front": _drafted(
        *(f"{{draft}}{gap}@" for gap in (" or rather\n", "\nRevised:\n", "\n", "\n```\n```json\n"))
    ),
    "draft in reasoning": _drafted("<think>{draft} hm</think>@"),
}
_OF_VERDICTS: dict[str, Adversary] = {
    "entry behind": _around_last("@\nAlso:\n{entry}", "@\n```json\n[{entry}]\n```"),
    "broken entry behind": _around_last('@\n"score": -1, "relevant_steps": [1]', '@\n[{"rubric_index": 0, "score": '),
    "entries amiss": _entries_amiss,
    "titles exchanged": _titles_exchanged,
    "field twice": _field_twice,
}
ADVERSARIES: dict[str, dict[str, Adversary]] = {
    "score": _OF_ALL | _OF_VERDICTS,
    "credit": _OF_ALL | _OF_VERDICTS,
    "criteria": _OF_ALL,
}
_OF_TWO = ("titles exchanged", "entry behind")
"""Adversaries that need two criteria."""

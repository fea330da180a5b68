"""The report in headless Chromium: the path a reader clicks, a quiet console, and hostile text that stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from draco_ray.judging.labels import Label, load_labels
from draco_ray.lab.report.page import write_report
from draco_ray.records import Criterion
from tests.support import small_run as small_run_module
from tests.support.browser import NAMES, Browser, find_browser
from tests.support.small_run import HOSTILE, PROMPT, TASKS, small_run

PROGRAM = find_browser()
DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason=f"no browser: none of {', '.join(NAMES)} on PATH, no DRACO_TEST_BROWSER"
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    path = folder / "report.html"
    write_report(small_run(folder / "small"), path)
    return path.as_uri()


@pytest.fixture(scope="module")
def started_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(started_browser: Browser, page: str) -> Iterator[Browser]:
    """The report, opened afresh; afterwards nothing was complained about, loaded or run."""
    started_browser.goto("about:blank")
    started_browser.console.clear()
    started_browser.requests.clear()
    started_browser.goto(page)
    started_browser.wait("document.body?.dataset.ready === '#overview'")
    yield started_browser
    assert started_browser.run("typeof window.hacked") == "undefined"
    assert started_browser.run("document.querySelectorAll('img, iframe, object').length") == 0
    text = started_browser.run("document.body.textContent")
    assert not [word for word in ("[object", "NaN", "undefined,") if word in text]
    assert started_browser.console == []
    assert {url.split("#")[0] for url in started_browser.requests} == {page}


def at(browser: Browser, place: str) -> None:
    browser.wait(f"document.body.dataset.ready === {json.dumps(place)}")


def shown(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.view')].filter(v => !v.hidden).map(v => v.id)")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)")


def choose(browser: Browser, selector: str, value: str) -> None:
    found = f"document.querySelector({json.dumps(selector)})"
    browser.run(f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('change'))")


def test_from_the_overview_to_the_steps_behind_a_verdict(browser: Browser) -> None:
    assert len(texts(browser, "#overview figure svg")) >= 10
    browser.click("nav a[data-view=groups]")
    at(browser, "#groups")
    assert len(texts(browser, ".list tbody tr")) == 4

    browser.click(f".list tbody a[href='#group/1/{TASKS[0]}']")
    at(browser, f"#group/1/{TASKS[0]}")
    assert texts(browser, "#matrix tbody s") == ["Never <i>fails</i>"]
    assert texts(browser, "#matrix tbody a.verdict") == ["✓", "✗", "✓", "✗", "✓", "–"]
    assert texts(browser, "#matrix thead tr:nth-child(2) td") == ["reward R", "+1.00", "−1.00"]

    browser.click("#matrix tbody tr:nth-child(2) td:nth-child(2) a")
    at(browser, f"#rollout/1/{TASKS[0]}/0/c2")
    lit = "[...document.querySelectorAll('article.lit')].map(n => n.id)"
    assert browser.run(lit) == ["t1", "t2"]
    assert "credit call: fail" in texts(browser, "#c2")[0]

    browser.click("#c1")
    at(browser, f"#rollout/1/{TASKS[0]}/0/c1")
    assert browser.run(lit) == ["t2"]
    why = texts(browser, "#why")[0]
    assert f"Because {TASKS[0]}." in why
    assert "The second step did it." in why
    assert HOSTILE in why

    browser.run("history.back()")
    at(browser, f"#rollout/1/{TASKS[0]}/0/c2")
    assert browser.run(lit) == ["t1", "t2"]


def test_a_group_is_unpacked_when_it_is_opened(browser: Browser) -> None:
    browser.click("nav a[data-view=groups]")
    at(browser, "#groups")
    assert browser.run("[...unpacked.keys()]") == []
    browser.click(f".list tbody a[href='#group/2/{TASKS[0]}']")
    at(browser, f"#group/2/{TASKS[0]}")
    assert browser.run("[...unpacked.keys()]") == [2]


def test_bars_show_the_share_of_the_push(browser: Browser, page: str) -> None:
    browser.goto(f"{page}#rollout/1/{TASKS[0]}/1")
    at(browser, f"#rollout/1/{TASKS[0]}/1")
    # The loser's two steps are pushed alike; the first is not cited, the closing turn is in no step.
    assert texts(browser, "article .push") == ["50%", "50%"]
    bars = "[...document.querySelectorAll('.strip i')].map(n => n.className)"
    assert browser.run(bars) == ["minus uncited", "minus", "gap"]
    assert browser.run("[...document.querySelectorAll('article')].map(n => n.className)") == [
        "turn isuncited",
        "turn",
        "turn isgap",
    ]
    grey = "getComputedStyle(document.querySelector('.strip i.uncited')).backgroundColor"
    assert browser.run(grey) == "rgb(154, 164, 175)"
    assert "no verdict cites it" in texts(browser, ".legend")[0]


def test_an_advantage_of_rounding_is_neither_green_nor_red(browser: Browser) -> None:
    assert browser.run("[6e-17, -6e-17, 0, null, 0.01, -0.01].map(sign)") == ["zero"] * 4 + ["plus", "minus"]


def test_reasoning_and_output_fold(browser: Browser, page: str) -> None:
    browser.goto(f"{page}#rollout/1/{TASKS[0]}/0")
    at(browser, f"#rollout/1/{TASKS[0]}/0")
    fold = "document.querySelector('#t1 details.reasoning').open"
    assert browser.run(fold) is True
    browser.click("#t1 details.reasoning summary")
    assert browser.run(fold) is False
    assert texts(browser, "#t1 details.output pre") == [HOSTILE]


def test_a_judge_call_shows_its_prompt_only_when_opened(browser: Browser, page: str) -> None:
    browser.goto(f"{page}#rollout/1/{TASKS[0]}/0")
    at(browser, f"#rollout/1/{TASKS[0]}/0")
    assert texts(browser, ".call pre") == []
    browser.click("#call1 summary")
    browser.wait("document.querySelectorAll('#call1 pre').length === 2")
    assert texts(browser, "#call1 pre")[0] == PROMPT
    assert "judge/<b>model</b>" in texts(browser, "#call1 summary")[0]
    assert "$0.0200" in texts(browser, "#call1 summary")[0]


def test_a_link_leads_to_its_message(browser: Browser, page: str) -> None:
    browser.goto(f"{page}#rollout/2/{TASKS[1]}/1/t3")
    at(browser, f"#rollout/2/{TASKS[1]}/1/t3")
    assert browser.run("document.querySelector('.target').id") == "t3"
    browser.goto(f"{page}#group/2/{TASKS[1]}/call2")
    at(browser, f"#group/2/{TASKS[1]}/call2")
    assert browser.run("document.querySelector('#group #call2').open") is True
    browser.goto(f"{page}#rollout/2/{TASKS[1]}/1")
    at(browser, f"#rollout/2/{TASKS[1]}/1")
    browser.click("#rollout #p2 summary a")
    at(browser, f"#rollout/2/{TASKS[1]}/1/p2")
    assert browser.run("document.querySelector('#rollout .target').id") == "p2"


def test_filters_narrow_the_list(browser: Browser) -> None:
    browser.click("nav a[data-view=groups]")
    at(browser, "#groups")
    rows = "document.querySelectorAll('.list tbody tr').length"
    browser.type("#filter-text", f"only {TASKS[1]}")
    assert browser.run(rows) == 2
    choose(browser, "#filter-step", "2")
    assert browser.run(rows) == 1
    assert texts(browser, "#count") == ["1 of 4 groups"]
    choose(browser, "#filter-kind", "nosignal")
    assert browser.run(rows) == 0


def test_search_finds_messages_and_leads_to_them(browser: Browser) -> None:
    browser.type("#query", "SHOW_TRANSACTIONS")
    browser.enter()
    browser.wait("document.getElementById('found-state')?.textContent.endsWith('found.')")
    links = browser.run("[...document.querySelectorAll('.hits a')].map(n => n.getAttribute('href'))")
    # Two prompts of each group and one message of each rollout.
    assert len(links) == 4 * (2 + 2)
    assert f"#rollout/2/{TASKS[1]}/1/t1" in links
    browser.click(f".hits a[href='#rollout/2/{TASKS[1]}/1/t1']")
    at(browser, f"#rollout/2/{TASKS[1]}/1/t1")
    assert shown(browser) == ["rollout"]


@pytest.mark.parametrize(
    ("words", "links"),
    [
        # What the task says is a message; what only a judge's prompt says is found there.
        (f"do {TASKS[0]}", [f"#group/{step}/{TASKS[0]}/p2" for step in (1, 2)]),
        ("grade this run", [f"#rollout/1/{TASKS[0]}/1/call1", f"#group/2/{TASKS[1]}/call2"]),
    ],
)
def test_search_reaches_the_task_and_every_prompt(browser: Browser, words: str, links: list[str]) -> None:
    browser.type("#query", words)
    browser.enter()
    browser.wait("document.getElementById('found-state')?.textContent.endsWith('found.')")
    found = browser.run("[...document.querySelectorAll('.hits a')].map(n => n.getAttribute('href'))")
    assert set(links) <= set(found)
    browser.click(f".hits a[href='{links[0]}']")
    at(browser, links[0])
    assert browser.run("document.querySelector('.view:not([hidden]) .target').id") == links[0].rsplit("/", 1)[1]


def test_labels_of_verdicts_are_kept_and_exported(browser: Browser, page: str, tmp_path: Path) -> None:
    place = f"#rollout/1/{TASKS[0]}/1/c1"
    browser.run("localStorage.clear()")
    browser.goto(page + place)
    at(browser, place)
    assert texts(browser, "#label button") == ["right", "wrong: pass", "wrong: not applicable", "right", "wrong"]
    browser.click("[data-label='verdict 1']")
    browser.click("[data-label='citation false']")
    browser.run("document.querySelector('#label-steps').value = '1, 2, 77'")
    browser.run("document.querySelector('#label-steps').dispatchEvent(new Event('change'))")
    browser.run(f"document.querySelector('#label-note').value = {json.dumps(HOSTILE)}")
    browser.run("document.querySelector('#label-note').dispatchEvent(new Event('change'))")
    assert texts(browser, "#c1 .tag.label") == ["marked wrong"]
    browser.goto(page + f"#rollout/2/{TASKS[1]}/0/c2")
    at(browser, f"#rollout/2/{TASKS[1]}/0/c2")
    browser.click("[data-label='verdict 1']")
    browser.click("[data-label='verdict 1']")
    assert texts(browser, "#c2 .tag.label") == []
    browser.click("[data-label='citation true']")
    # They are there when the page is opened again, and go into a file that the command reads.
    browser.goto("about:blank")
    browser.goto(f"{page}#labels")
    at(browser, "#labels")
    assert len(texts(browser, "#labels tbody tr")) == 2
    browser.downloads(tmp_path)
    browser.click("#label-export")
    path = tmp_path / "labels.jsonl"
    browser.wait_until(path.exists)
    first, second = load_labels([path])
    assert (first.judge, first.verdict, first.citation, first.steps) == (-1, 1, False, (1, 2))
    assert (first.evidence, first.note, first.cited, first.drawn) == (HOSTILE, HOSTILE, (2,), False)
    assert (second.verdict, second.citation, second.steps) == (None, True, None)
    browser.click("#label-draw")
    browser.wait("location.hash.startsWith('#rollout/')")
    browser.wait("document.querySelector('[data-label^=verdict]')")
    browser.click("[data-label^=verdict]")
    assert [label.drawn for label in parsed(browser.run("labelLines()"), tmp_path)] == [False, False, True]
    browser.run("localStorage.clear()")


def parsed(lines: str, folder: Path) -> list[Label]:
    (folder / "again.jsonl").write_text(lines)
    return load_labels([folder / "again.jsonl"])


ADVERSARIAL = {
    "end of script": "</script><script>window.hacked = 3</script></title></textarea></pre></svg>",
    "comment": "<!-- <script> -->]]><![CDATA[<?php ?>",
    "line separators": "a\u2028b\u2029c\x85d\x0be\x00f",
    "direction": "pass\u202esliaf\u202c \u2067x\u2069 \u2066y",
    "prototype": "__proto__",
    "constructor": "constructor",
    "one word": "w" * 5000,
    "one wide word": "\u5b57" * 3000,
    "longer in lower case": "\u0130" * 40 + "needle" + "\u0130" * 40,
    "half a character": "\ud83d".encode("utf-8", "replace").decode() + "\U0001f600" * 20,
    "attribute": "\" onmouseover='window.hacked = 4' x=\"",
}
"""What a judge or a policy may write where a title, a reason or a message is expected."""


@pytest.mark.parametrize("text", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_whatever_a_title_or_a_message_holds_is_shown_as_text(
    started_browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def titled(task: str) -> list[Criterion]:
        return [replace(each, title=f"{number} {text}", source=text) for number, each in enumerate(rubric(task))]

    rubric = small_run_module.rubric
    monkeypatch.setattr(small_run_module, "rubric", titled)
    monkeypatch.setattr(small_run_module, "HOSTILE", text)
    monkeypatch.setattr(small_run_module, "TASKS", (TASKS[0], "__proto__"))
    monkeypatch.setattr(small_run_module, "CODE", text)
    path = tmp_path / "report.html"
    write_report(small_run(tmp_path / "run"), path)
    started_browser.console.clear()
    started_browser.goto("about:blank")
    started_browser.goto(path.as_uri())
    started_browser.wait("document.body?.dataset.ready === '#overview'")
    wanted = DIRECTION.sub(lambda found: f"\u27e8U+{ord(found[0]):X}\u27e9", text)
    for place in ("#overview", "#groups", "#group/1/__proto__", "#rollout/1/__proto__/0", "#rollout/1/__proto__/0/c1"):
        started_browser.goto(path.as_uri() + place)
        at(started_browser, place)
        # Nothing is as wide as its longest word, and nothing that the text says has happened.
        assert started_browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), (
            place
        )
        assert started_browser.run("typeof window.hacked") == "undefined"
        assert not DIRECTION.search(started_browser.run("document.body.innerText")), place
    assert texts(started_browser, "#c1 span:nth-child(2)")[0].startswith(f"0 {wanted}")
    assert wanted in texts(started_browser, "#why")[0]
    found = text.split()[0][:40] if text[0] != "\u0130" else "NEEDLE"
    started_browser.type("#query", found)
    started_browser.enter()
    started_browser.wait("document.getElementById('found-state')?.textContent.endsWith('found.')")
    marked = texts(started_browser, ".hits mark")
    assert marked
    assert {mark.lower() for mark in marked} == {DIRECTION.sub(lambda c: f"\u27e8U+{ord(c[0]):X}\u27e9", found).lower()}
    assert started_browser.console == []


@pytest.mark.parametrize("place", ["#group/9/nothing", "#rollout/1/aaa1111_1/99", "#rollout/%E0%A4%A", "#%00"])
def test_a_wrong_link_is_no_error(browser: Browser, page: str, place: str) -> None:
    browser.goto(page + place)
    browser.wait("!['#overview', undefined].includes(document.body.dataset.ready)")
    assert len(shown(browser)) == 1

"""The report in headless Chromium: the path a reader clicks, a quiet console, and hostile text that stays text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from draco_ray import judge_sync
from draco_ray.judging.labels import Label, load_labels
from draco_ray.lab.report.page import write_report
from draco_ray.records import Criterion, EpisodeEnd, Evaluation
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.traces.load import groups_of
from tests.support import small_run as small_run_module
from tests.support.adapters import CannedCompleter
from tests.support.browser import NAMES, Browser, find_browser
from tests.support.measured_run import HELD_OUT, judged_run
from tests.support.small_run import CODE, HOSTILE, PROMPT, TASKS, small_run, write_group

PROGRAM = find_browser()
DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.packages,
    pytest.mark.skipif(
        PROGRAM is None, reason=f"no browser: none of {', '.join(NAMES)} on PATH, no DRACO_TEST_BROWSER"
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    path = folder / "report.html"
    write_report(small_run(folder / "small"), path, tokens=True)
    return path.as_uri()


@pytest.fixture(scope="module")
def started_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(started_browser: Browser, page: str) -> Iterator[Browser]:
    """The report, opened afresh; afterwards nothing was complained about, loaded or run."""
    started_browser.look()
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
    browser.wait(f"document.body?.dataset.ready === {json.dumps(place)}")


def shown(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.view')].filter(v => !v.hidden).map(v => v.id)")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)")


def choose(browser: Browser, selector: str, value: str) -> None:
    found = f"document.querySelector({json.dumps(selector)})"
    browser.run(f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('change'))")


def test_a_step_shows_its_sampled_tokens(browser: Browser, page: str) -> None:
    browser.goto(f"{page}#rollout/1/{TASKS[0]}/0")
    at(browser, f"#rollout/1/{TASKS[0]}/0")
    assert texts(browser, "#t1 .token") == []
    browser.click("#t1 .tokens summary")
    browser.wait("document.querySelectorAll('#t1 .token').length > 0")
    assert texts(browser, "#t1 .token") == ["#1 ", "#2 "]
    title = browser.run("document.querySelector('#t1 .token').title")
    assert title.startswith('"#1 ", log-probability 0.000, advantage ')


def test_from_the_overview_to_the_steps_behind_a_verdict(browser: Browser) -> None:
    assert len(texts(browser, "#overview figure svg")) >= 10
    browser.click("nav a[data-view=groups]")
    at(browser, "#groups")
    assert len(texts(browser, ".list tbody tr")) == 4

    browser.click(f".list tbody a[href='#group/1/{TASKS[0]}']")
    at(browser, f"#group/1/{TASKS[0]}")
    assert texts(browser, "#matrix tbody s") == ["Never <i>fails</i>"]
    assert texts(browser, "#matrix tbody a.verdict") == ["✓", "✗", "✓", "✗", "✓", "–"]
    assert texts(browser, "#matrix thead tr:nth-child(2) td") == ["+1.00", "−1.00"]

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
    assert texts(browser, "article [title^='quality:']") == ["Q 0.00", "Q 0.00"]
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
    browser.click("#rollout #p2 .linkto")
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
    assert texts(browser, "#count") == ["1 of 6 groups"]
    choose(browser, "#filter-kind", "nosignal")
    assert browser.run(rows) == 0


def found(browser: Browser) -> list[str]:
    browser.wait("document.getElementById('found-state')?.textContent.endsWith('found.')")
    return browser.run("[...document.querySelectorAll('.hits a')].map(n => n.getAttribute('href'))")


def test_search_finds_messages_and_leads_to_them(browser: Browser) -> None:
    browser.type("#query", "SHOW_TRANSACTIONS")
    browser.enter()
    # One message of each rollout, evaluated ones too, and not the prompts that repeat them.
    links = found(browser)
    assert len(links) == 4 * 2 + 2
    assert f"#rollout/2/{TASKS[1]}/1/t1" in links
    browser.click(f".hits a[href='#rollout/2/{TASKS[1]}/1/t1']")
    at(browser, f"#rollout/2/{TASKS[1]}/1/t1")
    assert shown(browser) == ["rollout"]


@pytest.mark.parametrize(
    ("words", "role", "scope", "links"),
    [
        # What the task says is a message; what only a judge's prompt says is found there.
        (f"do {TASKS[0]}", "task", "trained", [f"#group/{step}/{TASKS[0]}/p2" for step in (1, 2)]),
        (
            "grade this run",
            "prompt",
            f"task {TASKS[0]}",
            [f"#rollout/1/{TASKS[0]}/1/call1", f"#group/2/{TASKS[0]}/call2"],
        ),
        ("second line", "agent", "at 2", [f"#rollout/2/{task}/{rollout}/t1" for task in TASKS for rollout in (0, 1)]),
        ("ok", "environment", "evaluated", [f"#rollout/test%20after%20step%202/{task}/0/t2" for task in TASKS]),
        ("[]", "reply", "at 1", [f"#group/1/{TASKS[0]}/call1", f"#rollout/1/{TASKS[1]}/0/call2"]),
    ],
)
def test_search_is_by_role_and_scope(browser: Browser, words: str, role: str, scope: str, links: list[str]) -> None:
    browser.type("#query", words)
    browser.enter()
    found(browser)
    choose(browser, "#found-role", role)
    browser.wait(f"decodeURIComponent(document.body.dataset.ready).includes('/{role}/')")
    choose(browser, "#found-scope", scope)
    browser.wait(f"decodeURIComponent(document.body.dataset.ready).endsWith({json.dumps(scope)})")
    hits = found(browser)
    assert set(links) <= set(hits)
    if role in ("agent", "environment"):
        assert sorted(hits) == sorted(links)
    browser.click(f".hits a[href='{links[0]}']")
    at(browser, links[0])
    assert browser.run("document.querySelector('.view:not([hidden]) .target').id") == links[0].rsplit("/", 1)[1]


def test_the_keyboard_goes_through_lists_and_to_neighbours(browser: Browser) -> None:
    focused = "document.activeElement.getAttribute('href')"
    browser.click("nav a[data-view=groups]")
    at(browser, "#groups")
    browser.press("j")
    assert browser.run(focused) == f"#group/1/{TASKS[0]}"
    browser.press("j")
    assert browser.run(focused) == f"#group/1/{TASKS[1]}"
    browser.press("k")
    browser.enter()
    at(browser, f"#group/1/{TASKS[0]}")
    browser.press("ArrowRight")
    at(browser, f"#group/1/{TASKS[1]}")
    browser.press("ArrowLeft")
    at(browser, f"#group/1/{TASKS[0]}")
    browser.press("j")
    assert browser.run(focused) == f"#rollout/1/{TASKS[0]}/0/c1"
    browser.enter()
    at(browser, f"#rollout/1/{TASKS[0]}/0/c1")
    browser.press("j")
    browser.press("j")
    assert browser.run(focused) == f"#rollout/1/{TASKS[0]}/0/t2"
    browser.press("ArrowRight")
    at(browser, f"#rollout/1/{TASKS[0]}/1")
    browser.press("/")
    assert browser.run("document.activeElement.id") == "query"
    # What is typed is text.
    browser.press("j")
    assert browser.run("document.getElementById('query').value") == "j"
    browser.press("Escape")
    browser.press("?")
    assert browser.run("document.getElementById('keys').hidden") is False


def test_the_arrows_pass_a_rollout_that_was_lost(started_browser: Browser, tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "run", "{}\n"))
    write_group(store, 1, TASKS[0], 3)
    (lost,) = (tmp_path / "run" / "tables" / "trajectories").glob(f"*/{TASKS[0]}-1*")
    lost.unlink()
    path = tmp_path / "report.html"
    write_report(store.directory, path)
    started_browser.look()
    started_browser.goto("about:blank")
    started_browser.goto(f"{path.as_uri()}#rollout/1/{TASKS[0]}/0")
    at(started_browser, f"#rollout/1/{TASKS[0]}/0")
    started_browser.press("ArrowRight")
    at(started_browser, f"#rollout/1/{TASKS[0]}/2")
    started_browser.press("ArrowLeft")
    at(started_browser, f"#rollout/1/{TASKS[0]}/0")


def test_what_was_measured_before_training_is_listed_while_nothing_else_is(
    started_browser: Browser, tmp_path: Path
) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "run", "{}\n"))
    evaluation = Evaluation(
        task_id=TASKS[0], run=0, success=True, passed_tests=2, total_tests=2, turns=3, ended=EpisodeEnd.FINISHED
    )
    store.write("evaluations", 0, "test", rows.evaluation_rows(0, "test", [evaluation]))
    played = small_run_module.a_trajectory(0, TASKS[0], 0)
    store.write("evaluation_trajectories", 0, TASKS[0], rows.trajectory_rows(0, played))
    store.write("evaluation_steps", 0, TASKS[0], rows.step_rows(0, played))
    path = tmp_path / "report.html"
    write_report(store.directory, path)
    started_browser.look()
    started_browser.console.clear()
    started_browser.goto("about:blank")
    started_browser.goto(f"{path.as_uri()}#groups")
    at(started_browser, "#groups")
    assert texts(started_browser, ".list tbody .chip") == ["✓"]
    assert started_browser.run("document.getElementById('filter-of').value") == "evaluated"
    assert started_browser.console == []


def test_evidence_leads_to_the_steps_it_names(browser: Browser, page: str) -> None:
    place = f"#rollout/1/{TASKS[0]}/0/c1"
    browser.goto(page + place)
    at(browser, place)
    assert texts(browser, "#why a.tostep") == ["2"]
    browser.click("#why a.tostep")
    at(browser, f"#rollout/1/{TASKS[0]}/0/t2")
    assert browser.run("document.querySelector('.target').id") == "t2"
    rollout = "{turns: [{step: 1}, {step: null}, {step: 2}, {step: 12}]}"
    for words, links in (
        ("Step 1 and step 12", ["t1", "t4"]),
        ("steps 1, 2, and 7", ["t1", "t3"]),
        ("Steps 1-2 (not 12)", ["t1", "t3"]),
        ("STEP 2", ["t3"]),
        ("footsteps 1, 12 steps", []),
    ):
        said = f"withSteps({json.dumps(words)}, {rollout}, (part) => part)"
        assert browser.run(f"{said}.filter(n => n.href !== undefined).map(n => n.getAttribute('href'))") == links, words
        assert browser.run(f"{said}.map(n => n.textContent ?? n).join('')") == words


def test_groups_are_sorted_and_exported(browser: Browser, tmp_path: Path) -> None:
    browser.click("nav a[data-view=groups]")
    at(browser, "#groups")
    rows = "[...document.querySelectorAll('.list tbody a.item')].map(n => n.getAttribute('href'))"
    browser.click("th[data-column=task] button")
    assert browser.run(rows) == [f"#group/{step}/{task}" for task in TASKS for step in (1, 2)]
    browser.click("th[data-column=task] button")
    assert browser.run(rows) == [f"#group/{step}/{task}" for task in TASKS[::-1] for step in (1, 2)]
    assert browser.run("document.querySelector('th[data-column=task]').ariaSort") == "descending"
    browser.downloads(tmp_path)
    browser.click(f".list a[href='#group/1/{TASKS[0]}']")
    at(browser, f"#group/1/{TASKS[0]}")
    browser.click("#group .export")
    path = tmp_path / f"{TASKS[0]}-1.json"
    browser.wait_until(path.exists)
    group = json.loads(path.read_text(encoding="utf-8"))
    assert group["rollouts"][0]["turns"][0]["action"] == CODE
    assert group["rollouts"][1]["verdicts"]["0"][0] == -1
    assert group["calls"][0]["prompt"] == PROMPT


def test_code_is_coloured_and_copied(browser: Browser, page: str) -> None:
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.goto(f"{page}#rollout/1/{TASKS[0]}/0")
    at(browser, f"#rollout/1/{TASKS[0]}/0")
    assert texts(browser, "#t1 pre.code .string") == ["'second line'"]
    assert texts(browser, "#t1 pre.code .called") == ["print", "show_transactions", "print"]
    assert texts(browser, "#t1 pre.code") == [CODE]
    browser.click("#t1 .copied:has(pre.code) button.copy")
    browser.wait("document.querySelector('#t1 .copied:has(pre.code) button.copy').textContent === 'copied'")
    assert browser.run("navigator.clipboard.readText()") == CODE
    for code in ("x = 'a", '"""b', "#", "f'{x}' # 'no'", "1_000.5e-3", "'\\\\'", "a\n\n"):
        assert browser.run(f"colored({json.dumps(code)}).map(n => n.textContent ?? n).join('')") == code


def test_any_steps_timeline_is_there(browser: Browser) -> None:
    title = "document.querySelector('#timeline svg').getAttribute('aria-label')"
    assert browser.run(title) == "Step 2: what ran when"
    choose(browser, "#timeline-step", "1")
    browser.wait(f"{title} === 'Step 1: what ran when'")


def test_a_task_in_all_steps_and_two_rollouts_side_by_side(browser: Browser, page: str) -> None:
    browser.goto(f"{page}#rollout/1/{TASKS[0]}/0")
    at(browser, f"#rollout/1/{TASKS[0]}/0")
    other = f"#beside/1/{TASKS[0]}/0/test%20after%20step%202/{TASKS[0]}/0"
    offered = browser.run("[...document.getElementById('beside-with').options].map(o => o.value)")
    assert offered == [
        "",
        f"#beside/1/{TASKS[0]}/0/1/{TASKS[0]}/1",
        *(f"#beside/1/{TASKS[0]}/0/2/{TASKS[0]}/{rollout}" for rollout in (0, 1)),
        other,
    ]
    choose(browser, "#beside-with", f"#beside/1/{TASKS[0]}/0/2/{TASKS[0]}/1")
    at(browser, f"#beside/1/{TASKS[0]}/0/2/{TASKS[0]}/1")
    assert texts(browser, "#both tbody a.verdict") == ["✓", "✗", "✓", "✗", "✓", "–"]
    assert len(texts(browser, ".side article")) == 6
    assert browser.run("document.querySelectorAll('#both tr.differs').length") == 3
    browser.goto(page + other)
    at(browser, other)
    assert "solvedyes" in texts(browser, ".side:nth-child(2) .facts")[0]
    browser.goto(f"{page}#task/{TASKS[0]}")
    at(browser, f"#task/{TASKS[0]}")
    assert texts(browser, "#task a.item") == ["step 1", "step 2", "test after step 2"]
    assert texts(browser, "#task table.matrix tbody tr:first-child td") == ["1 of 2", "1 of 2"]
    assert texts(browser, "#task table.matrix tbody tr:last-child td") == ["✓ 1 of 1", "✓ 1 of 1"]
    # A link in a cell has the colour of what the cell says, which is not that of links.
    color = "getComputedStyle(document.querySelector('#task {}')).color"
    shown = {browser.run(color.format(what)) for what in ("td.plus", "td.plus a", "a.item")}
    assert len(shown) == 2
    assert browser.run(color.format("td.plus a")) != browser.run(color.format("a.item"))


def test_what_was_never_proposed_is_not_marked_as_solved(started_browser: Browser, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=2)
    store, task = RunStore(run), TASKS[0]
    rubric = small_run_module.rubric(task)
    write_group(store, 3, task)
    share = small_run_module.advantages(3, task)
    store.write("criteria", 3, task, rows.criterion_rows(3, task, rubric, share)[:1])
    store.write("proposals", 3, task, rows.proposal_rows(3, task, rubric[:2]))
    path = tmp_path / "report.html"
    write_report(run, path)
    started_browser.look()
    started_browser.goto("about:blank")
    started_browser.goto(f"{path.as_uri()}#task/{task}")
    at(started_browser, f"#task/{task}")
    assert texts(started_browser, "#task table.matrix tbody td:last-child") == ["1 of 2", "✓", "·"]


def test_what_a_group_lacks_is_said(started_browser: Browser, tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "run", "{}\n"))
    write_group(store, 1, TASKS[0])
    state = {"state": "credited", "rollouts": 2, "lost": 2, "unscored": 1, "credit_failures": 1, "reason": None}
    store.write("groups", 1, TASKS[0], [{"training_step": 1, "task_id": TASKS[0], **state}])
    path = tmp_path / "report.html"
    write_report(store.directory, path)
    started_browser.look()
    started_browser.goto("about:blank")
    started_browser.goto(f"{path.as_uri()}#groups")
    at(started_browser, "#groups")
    assert texts(started_browser, "#groups .list .bad") == [" 2 lost"]
    started_browser.goto(f"{path.as_uri()}#group/1/{TASKS[0]}")
    at(started_browser, f"#group/1/{TASKS[0]}")
    said = [text.partition(":")[0] for text in texts(started_browser, "#group > p.bad")]
    assert said == ["2 rollouts lost", "1 rollout unscored and left out of the update", "1 rollout without step credit"]


def test_a_print_of_a_rollout_says_whose_it_is(browser: Browser, page: str) -> None:
    browser.look(width=718, media="print")
    browser.goto(f"{page}#rollout/1/{TASKS[0]}/1")
    at(browser, f"#rollout/1/{TASKS[0]}/1")
    assert f"{TASKS[0]}, step 1" in browser.run("document.querySelector('#rollout h1').innerText")


def test_a_group_of_sixteen_has_marks_that_do_not_overlap(started_browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(small_run(tmp_path / "run", steps=1, size=16), path)
    for width, media in ((400, "screen"), (718, "print")):
        started_browser.look(width=width, media=media)
        started_browser.goto("about:blank")
        started_browser.goto(f"{path.as_uri()}#group/1/{TASKS[0]}")
        at(started_browser, f"#group/1/{TASKS[0]}")
        marks = "[...document.querySelectorAll('#matrix tbody tr:first-child .verdict')]"
        boxes = started_browser.run(f"{marks}.map(n => n.getBoundingClientRect().toJSON())")
        assert len(boxes) == 16
        assert all(one["right"] <= other["left"] + 0.5 for one, other in itertools.pairwise(boxes)), (width, boxes)


def test_held_out_rollouts_are_listed_and_opened(browser: Browser) -> None:
    browser.click("nav a[data-view=groups]")
    at(browser, "#groups")
    choose(browser, "#filter-of", "evaluated")
    assert texts(browser, ".list tbody .chip") == ["✓", "✗"]
    browser.click(".list tbody .chip.minus")
    place = f"#rollout/test%20after%20step%202/{TASKS[1]}/0"
    at(browser, place)
    assert "Not solved: 1 of 2 tests passed." in texts(browser, "#rollout .panel")[0]
    assert len(texts(browser, "#rollout article")) == 3


def test_held_out_rollouts_that_the_judge_scored_are_opened_with_their_verdicts(
    started_browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_report(judged_run(tmp_path / "run"), path)
    started_browser.look()
    started_browser.console.clear()
    started_browser.goto("about:blank")
    started_browser.goto(f"{path.as_uri()}#groups")
    at(started_browser, "#groups")
    choose(started_browser, "#filter-of", "dev after step 1")
    assert texts(started_browser, ".list tbody .chip") == ["50%", "–"]
    started_browser.click(".list tbody a.item")
    group = f"#group/dev%20after%20step%201/{HELD_OUT}"
    at(started_browser, group)
    assert texts(started_browser, "#matrix tbody td:nth-child(2)") == ["✓", "✗", "–"]
    started_browser.click("#matrix tbody tr:nth-child(2) a")
    at(started_browser, f"{group.replace('group', 'rollout')}/0/c2")
    assert "Asked once more: pass." in texts(started_browser, "#why")[0]
    # Nothing is asked about it whose answer would be taken for one on a training rollout.
    assert texts(started_browser, "#label") == []
    started_browser.goto(f"{path.as_uri()}{group.replace('group', 'rollout')}/1")
    at(started_browser, f"{group.replace('group', 'rollout')}/1")
    assert "Not scored: no criterion" in texts(started_browser, ".panel")[0]
    assert started_browser.console == []


PLACES = (
    "#overview",
    "#groups",
    f"#group/1/{TASKS[0]}",
    f"#rollout/1/{TASKS[0]}/0/c1",
    f"#group/test%20after%20step%202/{TASKS[0]}",
    f"#rollout/test%20after%20step%202/{TASKS[0]}/0",
    f"#task/{TASKS[0]}",
    f"#beside/1/{TASKS[0]}/0/2/{TASKS[0]}/1",
    "#labels",
    "#found/show/agent/trained",
)


COLOURS = ["color-contrast", "link-in-text-block"]
"""The rules of axe that look at colours: all that a dark scheme can change, and what a width does not."""


@pytest.mark.parametrize(
    ("scheme", "width", "options"),
    [
        ("light", 1400, {}),
        ("dark", 1400, {"runOnly": COLOURS}),
        ("light", 400, {"rules": {rule: {"enabled": False} for rule in COLOURS}}),
    ],
)
def test_axe_finds_nothing(browser: Browser, page: str, scheme: str, width: int, options: dict[str, object]) -> None:
    told = json.dumps({**options, "resultTypes": ["violations"]})
    browser.look(scheme=scheme, width=width)
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    browser.run(f"{axe}; 0")
    for place in PLACES:
        browser.goto(page + place)
        at(browser, place)
        violations = browser.run(f"axe.run(document, {told}).then(found => found.violations)")
        found = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations]
        assert found == [], (place, found)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of groups of six."""
    folder = tmp_path_factory.mktemp("six")
    write_report(small_run(folder / "run", steps=1, size=6), folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize(("width", "media"), [(400, "screen"), (800, "screen"), (718, "print")])
def test_a_group_of_six_is_readable(started_browser: Browser, six: Path, width: int, media: str) -> None:
    started_browser.look(width=width, media=media)
    for place in (*PLACES[:4], f"#rollout/1/{TASKS[0]}/5", f"#beside/1/{TASKS[0]}/0/1/{TASKS[0]}/5"):
        started_browser.goto("about:blank")
        started_browser.goto(six.as_uri() + place)
        at(started_browser, place)
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert started_browser.run(wide), place
        if place == "#overview" and media == "screen":
            # Letters of a wide chart are no smaller than those of the others.
            heights = started_browser.run(
                "[...document.querySelectorAll('#overview svg text')].map(n => n.getBoundingClientRect().height)"
            )
            assert min(heights) >= 7
        if place == "#groups":
            # All six rollouts of a group, without scrolling.
            right = "[...document.querySelectorAll('.list .chip')].map(n => n.getBoundingClientRect().right)"
            assert max(started_browser.run(right)) <= width
        if place.startswith("#group/"):
            # A number is in one line.
            tall = "[...document.querySelectorAll('#matrix .sub td')].filter(n => /\\d/.test(n.textContent))"
            assert max(started_browser.run(f"{tall}.map(n => n.getBoundingClientRect().height)")) < 26
            # The names of the criteria and the sixth rollout's verdicts, without scrolling.
            for cell in (
                "#matrix tbody td:first-child summary",
                "#matrix tbody td:last-child a, #matrix tbody td:last-child",
            ):
                box = started_browser.run(f"document.querySelector('{cell}').getBoundingClientRect().toJSON()")
                assert 0 <= box["left"] < box["right"] <= width, (cell, box)
                assert box["right"] - box["left"] >= 20, (cell, box)


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
    browser.press("j")
    assert browser.run("document.activeElement.getAttribute('href')") == place
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
    browser.wait("document.querySelector('[data-label^=verdict]') !== null")
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
    write_report(small_run(tmp_path / "run", steps=1), path)
    started_browser.look()
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


@pytest.fixture(scope="module")
def traces_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of three judged traces of two tasks, whose names and texts are hostile."""
    folder = tmp_path_factory.mktemp("traces")

    def chat(flight: str) -> dict[str, object]:
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "book", "arguments": json.dumps({"flight": flight})},
        }
        said = [
            {"role": "user", "content": f"Book the cheapest flight. {HOSTILE}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": f"booked {flight}"},
        ]
        return {"id": f"{flight} {HOSTILE}", "task_id": "cheap" if flight != "UA2" else "other", "messages": said}

    groups = groups_of([chat("DL9"), chat("UA1"), chat("UA2")])
    judge_sync(groups, "canned", complete=CannedCompleter(), out=folder / "judged")
    write_report(RunDirectory.open(folder / "judged"), folder / "report.html")
    return (folder / "report.html").as_uri()


def test_judged_traces_are_listed_worst_first_sorted_and_filtered(started_browser: Browser, traces_page: str) -> None:
    browser = started_browser
    browser.console.clear()
    browser.goto(traces_page)
    at(browser, "#overview")
    shares = "#traces tbody tr:not([hidden]) td:nth-child(2)"
    assert texts(browser, shares) == ["50%", "50%", "100%"]
    browser.click("#traces th:nth-child(2) button")
    browser.click("#traces th:nth-child(2) button")
    assert texts(browser, shares) == ["100%", "50%", "50%"]
    browser.type("#trace-filter", "UA2")
    assert texts(browser, shares) == ["50%"]
    assert texts(browser, "#trace-count") == ["1 of 3 traces"]
    # The name has several lines, and the middle of its box may be beside them.
    browser.run("document.querySelector('#traces tbody tr:not([hidden]) a').click()")
    browser.wait("location.hash.startsWith('#rollout/1/other/0') && !document.getElementById('rollout').hidden")
    # The trace's own name and file, and none of what only a rollout of training has.
    assert browser.run("document.querySelector('#rollout h1').textContent.startsWith('UA2')")
    page = browser.run("document.querySelector('#rollout').textContent")
    assert not [word for word in ("policy version", "generating", "seconds", "Rollout 0") if word in page]
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.console == []

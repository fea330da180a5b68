"""The paper's prompts out of LaTeX: on a source of ours, and on the paper's where it lies beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draco_ray.commands.import_prompts import extract_listings, import_prompts
from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES
from draco_ray.judging.prompts import load_prompts

FILES = [phase.template for phase in PHASES.values() if not phase.merged]
PAPER = Path(os.environ.get("DRACO_PAPER_TEX", Path(__file__).parents[3] / "shared" / "paper" / "draco.tex"))


def listing(name: str, body: str) -> str:
    escaped = name.replace("_", "\\_")
    return (
        f"\\begin{{lstlisting}}[caption={{A [bracketed] caption\n  (\\texttt{{{escaped}}}).}}, label={{lst:x}}]\n"
        f"{body}\\end{{lstlisting}}\n\n"
    )


def source(bodies: dict[str, str]) -> str:
    told = (
        "an identical prompt with the final two lines replaced by\n"
        "\\texttt{Put it in <code> </code> and count\\_it.}, without more ado.\n"
    )
    other = "\\begin{lstlisting}\nno options, no name\n\\end{lstlisting}\n"
    return "\\section{Prompts}\n" + told + other + "".join(listing(name, body) for name, body in bodies.items())


@pytest.fixture
def bodies() -> dict[str, str]:
    judge = {}
    for phase in PHASES.values():
        name = phase.template
        words = "".join(f"{{{{ {word} }}}} " for word in sorted(phase.placeholders))
        judge[name] = f"Study $this$ \\carefully {{}}:\n{words}\n\n[1]\n"
    agent = "Example {'a': 1}\n\nI am {supervisor_first_name}.\nDo: {task_description}\nthink so\ncode so\n"
    return judge | {"prompts.py": agent}


def test_listings_keep_every_byte(tmp_path: Path, bodies: dict[str, str]) -> None:
    tex = tmp_path / "paper.tex"
    tex.write_text(source(bodies))
    out = tmp_path / "out" / "deep"
    written = import_prompts(tex, out)
    assert {path.name for path in written} == {*FILES, "agent_think.txt", "agent_no_think.txt"}
    for name in FILES:
        assert (out / name).read_text() == bodies[name]
    load_prompts(out)
    shared = "Example {'a': 1}\n\n--- user ---\nI am {supervisor_first_name}.\nDo: {task_description}\n"
    assert (out / "agent_think.txt").read_text() == f"{shared}think so\ncode so\n"
    assert (out / "agent_no_think.txt").read_text() == f"{shared}Put it in <code> </code> and count_it.\n"


def test_a_folder_of_sources_is_searched(tmp_path: Path, bodies: dict[str, str]) -> None:
    folder = tmp_path / "source" / "sections"
    folder.mkdir(parents=True)
    (folder / "prompts.tex").write_text(source(bodies))
    (tmp_path / "source" / "main.tex").write_text("\\input{sections/prompts}")
    assert len(import_prompts(tmp_path / "source", tmp_path / "out")) == 7


def test_importing_twice_is_harmless_and_other_content_is_not_overwritten(
    tmp_path: Path, bodies: dict[str, str]
) -> None:
    tex = tmp_path / "paper.tex"
    tex.write_text(source(bodies))
    import_prompts(tex, tmp_path / "out")
    import_prompts(tex, tmp_path / "out")
    mine = tmp_path / "out" / "score_rubrics.txt"
    mine.write_text("my own")
    with pytest.raises(ConfigError, match="already exists with different content"):
        import_prompts(tex, tmp_path / "out")
    assert mine.read_text() == "my own"


def test_a_source_without_a_prompt_writes_nothing(tmp_path: Path, bodies: dict[str, str]) -> None:
    del bodies["union_rubrics.txt"]
    tex = tmp_path / "paper.tex"
    tex.write_text(source(bodies))
    with pytest.raises(ConfigError, match=r"no listing named union_rubrics\.txt"):
        import_prompts(tex, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_source_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        import_prompts(tmp_path / "none.tex", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"contains no \.tex file"):
        import_prompts(tmp_path, tmp_path / "out")


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not part of this repository")
def test_the_papers_own_source(tmp_path: Path) -> None:
    written = import_prompts(PAPER, tmp_path)
    assert len(written) == 7
    text = PAPER.read_text(encoding="utf-8")
    for name, body in extract_listings(text).items():
        # All that stands between the options and the end.
        assert f"]\n{body}\\end{{lstlisting}}" in text
        if name in FILES:
            assert (tmp_path / name).read_text(encoding="utf-8") == body
    load_prompts(tmp_path)
    think, plain = ((tmp_path / f"agent_{name}.txt").read_text().splitlines() for name in ("think", "no_think"))
    assert think[:-2] == plain[:-1]
    assert plain[-1].endswith("<code> </code> tags.")

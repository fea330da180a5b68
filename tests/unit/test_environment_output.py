"""Bounded output of a cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draco_ray.environments.appworld.process_roles import BoundedText, cut_to_bytes, escape_surrogates, truncate

TEXT = st.text(st.characters(exclude_categories=()), max_size=60)


@given(st.lists(TEXT, max_size=6), st.integers(0, 80))
def test_captured_text_is_bounded_and_marked(pieces: list[str], limit: int) -> None:
    captured = BoundedText(limit)
    for piece in pieces:
        assert captured.write(piece) == len(piece)
    whole = escape_surrogates("".join(pieces))
    if len(whole.encode()) <= limit:
        assert captured.getvalue() == whole
    else:
        kept, mark, rest = captured.getvalue().partition(f"\n[output cut at {limit} bytes]\n")
        assert mark
        assert not rest
        assert whole.startswith(kept)
        assert len(kept.encode()) <= limit


@given(TEXT, st.integers(0, 80))
def test_cutting_keeps_whole_characters(text: str, limit: int) -> None:
    kept = cut_to_bytes(text, limit)
    assert text.startswith(kept)
    assert len(kept.encode("utf-8", "surrogatepass")) <= limit
    assert kept == text or len(text[: len(kept) + 1].encode("utf-8", "surrogatepass")) > limit


def test_a_message_is_cut_with_a_mark() -> None:
    assert truncate("é" * 50, 100) == "é" * 50
    assert truncate("é" * 500, 100) == "é" * 50 + "\n[output cut at 100 bytes]\n"
    # What was captured and marked already is left alone.
    captured = BoundedText(100)
    captured.write("é" * 500)
    assert truncate(captured.getvalue(), 100) == captured.getvalue()


def test_a_limit_inside_the_first_character() -> None:
    captured = BoundedText(1)
    captured.write("éa")
    assert captured.getvalue() == "\n[output cut at 1 bytes]\n"

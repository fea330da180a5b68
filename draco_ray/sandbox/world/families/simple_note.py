"""Families about the supervisor's notes."""

from __future__ import annotations

import random
from datetime import timedelta

from draco_ray.sandbox.world import words
from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, Person, Row, World
from draco_ray.sandbox.world.scripts import (
    DATE,
    FATAL,
    TITLE,
    Change,
    Draft,
    Family,
    Fault,
    Faults,
    cell,
    fetch_cells,
    parameters_cell,
)


def notes_of(world: World, person: Person) -> list[Row]:
    """A person's notes in the order of the API: latest update first."""
    rows = world.where("simple_note.Note", user_id=person.id)
    return sorted(rows, key=lambda row: row["updated_at"], reverse=True)


class PinTaggedNotes(Family):
    """Pin the notes with a tag."""

    name = "pin_tagged_notes"
    apps = ("simple_note",)
    difficulty = 1
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        'Pin all my notes in Simple Note that have the tag "{tag}".',
        'In Simple Note, pin every note of mine that is tagged "{tag}".',
        'Please pin each of my Simple Note notes with the tag "{tag}".',
        'All my Simple Note notes tagged "{tag}" should be pinned. Pin them.',
    )

    def steps(self, faults: Faults) -> list[str]:
        sign = "not in" if Fault.WRONG_FILTER in faults else "in"
        return [
            parameters_cell(tag=TITLE),
            *fetch_cells("notes", "simple_note.search_notes", faults),
            cell("Select the notes.", f'notes = [n for n in rows if tag {sign} n["tags"]]', "print(len(notes))"),
            cell(
                "Pin the notes.",
                "for n in notes:",
                '    apis.simple_note.update_note(note_id=n["note_id"], pinned=True, access_token=simple_note_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        tag = rng.choice(words.NOTE_TAGS)
        notes = notes_of(world, person)
        tagged = [row for row in notes if tag in row["tags"]]
        # Pinning a pinned note again changes its date, so both doing and leaving it would have to be right.
        if all(row in notes[:PAGE_LIMIT] for row in tagged) or any(row["pinned"] for row in tagged):
            return None
        updated = tuple((row["id"], True) for row in tagged)
        change = Change("simple_note.Note", ("id", "pinned"), updated=updated, touched=("pinned", "updated_at"))
        return Draft({"tag": tag}, changes=(change,))


class DeleteOldNotes(Family):
    """Delete the notes created before a date."""

    name = "delete_old_notes"
    apps = ("simple_note",)
    difficulty = 2
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        "Delete all my notes in Simple Note that were created before {date}.",
        "In Simple Note, delete every note of mine that I created before {date}.",
        "Please delete each Simple Note note I created earlier than {date}.",
        "Clean up my Simple Note account: delete all notes created before {date}.",
    )

    def steps(self, faults: Faults) -> list[str]:
        sign = ">=" if Fault.WRONG_FILTER in faults else "<"
        return [
            parameters_cell(date=DATE),
            *fetch_cells("notes", "simple_note.search_notes", faults),
            cell("Select the notes.", f'notes = [n for n in rows if n["created_at"] {sign} date]', "print(len(notes))"),
            cell(
                "Delete the notes.",
                "for n in notes:",
                '    apis.simple_note.delete_note(note_id=n["note_id"], access_token=simple_note_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        before = NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))
        notes = notes_of(world, person)
        old = [row for row in notes if row["created_at"] < before]
        if all(row in notes[:PAGE_LIMIT] for row in old):
            return None
        removed = tuple((row["id"], row["title"]) for row in old)
        return Draft(
            {"date": before.date().isoformat()},
            changes=(Change("simple_note.Note", ("id", "title"), removed=removed),),
        )


FAMILIES = (PinTaggedNotes, DeleteOldNotes)

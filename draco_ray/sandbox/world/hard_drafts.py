"""Drafts of the hard variety's families: two or three apps a task, mostly two lists and two conditions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta

from draco_ray.sandbox.world.drafts import (
    CLOSE_RELATIONS,
    contacts_of,
    notes_of,
    pending_requests,
    related,
    text_change,
)
from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, WORDS, Person, Row, World
from draco_ray.sandbox.world.scripts import Change, Draft, SideEffect

TEXTED = (SideEffect("phone.UserTextMessage", added=True),)
FILED = (SideEffect("file_system.Directory", touched=("updated_at",)),)


def _names(people: Sequence[Row]) -> str:
    return "\n".join(sorted(f"{row['first_name']} {row['last_name']}" for row in people))


def _born_before(date: str, people: Sequence[Row]) -> list[Row]:
    return [row for row in people if row["birthday"] < date]


def _since(rng: random.Random) -> datetime:
    return NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))


def _requests(
    world: World, person: Person, rng: random.Random
) -> tuple[dict[str, str | int], list[Row], list[Row]] | None:
    """Parameters, the requests they choose and their senders as contacts; None where a fault would do no harm."""
    relation, limit = rng.choice(CLOSE_RELATIONS), rng.randrange(20, 120, 5)
    contacts, pending = contacts_of(world, person), pending_requests(world, person)

    def by(requests: list[Row], people: list[Row]) -> tuple[list[Row], list[Row]]:
        emails = {row["email"] for row in related(people, relation)}
        chosen = [row for row in requests if world.person(row["sender_id"]).email in emails]
        senders = {world.person(row["sender_id"]).email for row in chosen}
        return chosen, [row for row in contacts if row["email"] in senders]

    over = [row for row in pending if row["amount"] > limit]
    requests, senders = by(over, contacts)
    _, of_first_pages = by([row for row in over if row in pending[:PAGE_LIMIT]], contacts[:PAGE_LIMIT])
    _, of_smaller = by([row for row in pending if row["amount"] < limit], contacts)
    # Both kinds there are, or to select by the amount would be no work.
    if senders in ([], of_first_pages, of_smaller) or not of_smaller:
        return None
    return {"relation": relation, "limit": limit}, requests, senders


def deny_relation_requests(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Deny the chosen payment requests."""
    if (found := _requests(world, person, rng)) is None:
        return None
    params, requests, _ = found
    change = Change(
        "venmo.PaymentRequest",
        ("id",),
        updated=tuple((row["id"],) for row in requests),
        touched=("denied_at", "updated_at"),
    )
    return Draft(params, changes=(change,), side_effects=(SideEffect("venmo.Notification", added=True),))


def text_senders(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Text the senders of the chosen requests."""
    if (found := _requests(world, person, rng)) is None:
        return None
    params, _, senders = found
    message = rng.choice(WORDS["messages"])
    return Draft(params | {"message": message}, changes=text_change(person, senders, message), side_effects=TEXTED)


def note_of_senders(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Write the senders' names into a new note."""
    if (found := _requests(world, person, rng)) is None:
        return None
    params, _, senders = found
    title = rng.choice(WORDS["new_titles"])
    row = (person.id, title, _names(senders))
    return Draft(
        params | {"title": title},
        changes=(Change("simple_note.Note", ("user_id", "title", "content"), added=(row,)),),
    )


def file_of_senders(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Write the senders' names into a new file."""
    if (found := _requests(world, person, rng)) is None:
        return None
    params, _, senders = found
    stem = f"people_{rng.randint(1, 99)}"
    row = (person.id, f"~/documents/{stem}.txt", _names(senders))
    return Draft(
        params | {"stem": stem},
        changes=(Change("file_system.File", ("user_id", "tilde_path", "content"), added=(row,)),),
        side_effects=FILED,
    )


def _payments(world: World, person: Person, rng: random.Random) -> tuple[dict[str, str | int], list[Row]] | None:
    """Parameters and the payments they choose; None where a fault would do no harm."""

    def total(rows: list[Row]) -> float:
        return sum(row["amount"] for row in rows)

    relation, since = rng.choice(CLOSE_RELATIONS), _since(rng)
    contacts = contacts_of(world, person)
    received = world.where("venmo.Transaction", receiver_id=person.id)

    def by(payments: list[Row], people: list[Row]) -> list[Row]:
        emails = {row["email"] for row in related(people, relation)}
        return [row for row in payments if world.person(row["sender_id"]).email in emails]

    chosen = [row for row in by(received, contacts) if row["created_at"] >= since]
    early = [row for row in by(received, contacts) if row not in chosen]
    of_first_pages = [row for row in by(received[:PAGE_LIMIT], contacts[:PAGE_LIMIT]) if row in chosen]
    if not chosen or not early or total(chosen) in (total(of_first_pages), total(early)):
        return None
    return {"relation": relation, "date": since.date().isoformat()}, chosen


def like_relation_payments(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Like the chosen payments."""
    if (found := _payments(world, person, rng)) is None:
        return None
    params, chosen = found
    likes = tuple((person.id, row["id"]) for row in chosen)
    return Draft(
        params,
        changes=(Change("venmo.TransactionLike", ("user_id", "transaction_id"), added=likes),),
        side_effects=(SideEffect("venmo.Transaction", touched=("like_count", "updated_at")),),
    )


def sum_relation_payments(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Add up the chosen payments."""
    if (found := _payments(world, person, rng)) is None:
        return None
    params, chosen = found
    return Draft(params, answer=sum(row["amount"] for row in chosen))


def note_of_long_songs(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Write the titles of the library's long songs into a new note."""
    title, limit = rng.choice(WORDS["new_titles"]), rng.randrange(200, 400, 10)
    library = world.where("spotify.UserLibrarySong", user_id=person.id)
    songs = [world.get("spotify.Song", row["song_id"]) for row in library]
    long = [song for song in songs if song["duration"] > limit]
    if all(song in songs[:PAGE_LIMIT] for song in long) or len(long) == len(songs):
        return None
    row = (person.id, title, "\n".join(sorted(song["title"] for song in long)))
    return Draft(
        {"title": title, "limit": limit},
        changes=(Change("simple_note.Note", ("user_id", "title", "content"), added=(row,)),),
    )


def text_longest_song(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Text the title of the library's longest song to contacts of a relationship."""
    relation = rng.choice(CLOSE_RELATIONS)
    library = world.where("spotify.UserLibrarySong", user_id=person.id)
    songs = [world.get("spotify.Song", row["song_id"]) for row in library]
    longest = max(songs, key=lambda song: song["duration"])
    receivers = related(contacts_of(world, person), relation)
    if longest in songs[:PAGE_LIMIT] or not receivers:
        return None
    return Draft(
        {"relation": relation},
        changes=text_change(person, receivers, longest["title"]),
        side_effects=TEXTED,
    )


def file_of_contacts(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Write the names of contacts of a relationship born before a date into a new file."""
    if (found := _born(world, person, rng)) is None:
        return None
    params, people = found
    stem = f"people_{rng.randint(1, 99)}"
    row = (person.id, f"~/documents/{stem}.txt", _names(people))
    return Draft(
        params | {"stem": stem},
        changes=(Change("file_system.File", ("user_id", "tilde_path", "content"), added=(row,)),),
        side_effects=FILED,
    )


def _born(world: World, person: Person, rng: random.Random) -> tuple[dict[str, str | int], list[Row]] | None:
    """Parameters and the contacts they choose; None where a fault would do no harm."""
    relation = rng.choice(CLOSE_RELATIONS)
    date = datetime(rng.randint(1960, 1990), rng.randint(1, 12), 1).date().isoformat()
    contacts = contacts_of(world, person)
    people = _born_before(date, related(contacts, relation))
    first_page = _born_before(date, related(contacts[:PAGE_LIMIT], relation))
    if people in ([], first_page):
        return None
    return {"relation": relation, "date": date}, people


def star_recent_threads(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Star the threads received since a date from contacts of a relationship."""
    relation = rng.choice(CLOSE_RELATIONS)
    since = NOW.replace(hour=0) - timedelta(days=rng.randrange(20, 180))
    contacts = contacts_of(world, person)
    inbox = world.where("gmail.UserEmailThread", user_id=person.id, incoming=True)
    inbox.sort(key=lambda row: row["updated_at"], reverse=True)

    def by(rows: list[Row], people: list[Row]) -> list[Row]:
        emails = {row["email"] for row in related(people, relation)}
        senders = [world.get("gmail.Email", row["email_ids"][0])["sender_id"] for row in rows]
        return [row for row, sender in zip(rows, senders, strict=True) if world.person(sender).email in emails]

    chosen = [row for row in by(inbox, contacts) if row["created_at"] >= since]
    early = [row for row in by(inbox, contacts) if row not in chosen]
    of_first_pages = [row for row in by(inbox[:PAGE_LIMIT], contacts[:PAGE_LIMIT]) if row in chosen]
    if not chosen or not early or chosen == of_first_pages:
        return None
    change = Change(
        "gmail.UserEmailThread",
        ("id", "starred"),
        updated=tuple((row["id"], True) for row in chosen),
        touched=("starred", "updated_at"),
    )
    return Draft({"relation": relation, "date": since.date().isoformat()}, changes=(change,))


def text_note_born(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Text a note's content to contacts of a relationship born before a date."""
    note = rng.choice(notes_of(world, person)[PAGE_LIMIT:])
    if (found := _born(world, person, rng)) is None:
        return None
    params, people = found
    return Draft(
        params | {"title": note["title"]},
        changes=text_change(person, people, note["content"]),
        side_effects=TEXTED,
    )

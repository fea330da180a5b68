"""Drafts of the families: a task's parameters, and its ground truth from the world's rows.

`UnusableParameters` is raised if the chosen parameters make no good task: a fatal fault would do no harm, or there is
nothing to do.
Families of the hard variety, at the end, use two or three apps per task, and mostly two lists and two conditions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, RELATIONS, WORDS, Person, Row, World
from draco_ray.sandbox.world.scripts import Change, Draft, SideEffect

CLOSE_RELATIONS = ("coworker", "sibling", "roommate")
"""Relations that only the phone app knows (``friend`` is left out, because Venmo has its own friends)."""
TEXTED = (SideEffect("phone.UserTextMessage", added=True),)
FILED = (SideEffect("file_system.Directory", touched=("updated_at",)),)
NOTIFIED = (SideEffect("venmo.Notification", added=True),)

Params = dict[str, str | int]


class UnusableParameters(Exception):
    """Raised if the chosen parameters give no usable task."""


def require(good: object) -> None:
    """Raise `UnusableParameters` unless ``good``."""
    if not good:
        raise UnusableParameters


def added(model: str, fields: str, rows: Iterable[tuple[Any, ...]]) -> Change:
    """Rows to add; ``fields`` are separated by spaces."""
    return Change(model, tuple(fields.split()), added=tuple(rows))


def removed(model: str, fields: str, rows: Iterable[tuple[Any, ...]]) -> Change:
    """Rows to remove."""
    return Change(model, tuple(fields.split()), removed=tuple(rows))


def updated(model: str, fields: str, rows: Iterable[tuple[Any, ...]], touched: str) -> Change:
    """Rows to update, in the fields ``touched`` only."""
    return Change(model, tuple(fields.split()), updated=tuple(rows), touched=tuple(touched.split()))


def beyond_first_page(rows: Sequence[Row], keep: Callable[[Row], bool]) -> list[Row]:
    """The rows to keep, of which some must be beyond the first page of the list."""
    kept = [row for row in rows if keep(row)]
    require(any(row not in rows[:PAGE_LIMIT] for row in kept))
    return kept


def random_past_date(rng: random.Random, least: int = 60, most: int = 420) -> datetime:
    """A random midnight, at least ``least`` and less than ``most`` days ago."""
    return NOW.replace(hour=0) - timedelta(days=rng.randrange(least, most))


def _latest_first(rows: list[Row], field: str) -> list[Row]:
    return sorted(rows, key=lambda row: row[field], reverse=True)


def contacts_of(world: World, person: Person) -> list[Row]:
    """A person's contacts in the order of the API: latest first."""
    return _latest_first(world.where("phone.Contact", user_id=person.id), "created_at")


def notes_of(world: World, person: Person) -> list[Row]:
    """A person's notes in the order of the API: latest update first."""
    return _latest_first(world.where("simple_note.Note", user_id=person.id), "updated_at")


def pending_requests(world: World, person: Person) -> list[Row]:
    """Payment requests a person has not answered, in the order of the API: latest first."""
    rows = world.where("venmo.PaymentRequest", receiver_id=person.id, approved_at=None, denied_at=None)
    return _latest_first(rows, "created_at")


def inbox_of(world: World, person: Person) -> list[Row]:
    """Received email threads in the order of the API: latest update first."""
    return _latest_first(world.where("gmail.UserEmailThread", user_id=person.id, incoming=True), "updated_at")


def library_of(world: World, person: Person) -> list[Row]:
    """The songs of a person's library."""
    rows = world.where("spotify.UserLibrarySong", user_id=person.id)
    return [world.get("spotify.Song", row["song_id"]) for row in rows]


def related(rows: list[Row], relation: str) -> list[Row]:
    """The contacts of that relationship."""
    return [row for row in rows if relation in row["relationships"]]


def emails_of(rows: list[Row], relation: str) -> set[str]:
    """Addresses of the contacts of that relationship."""
    return {row["email"] for row in related(rows, relation)}


def sent_by(world: World, rows: list[Row], emails: set[str]) -> list[Row]:
    """The payments or requests whose sender has one of these addresses."""
    return [row for row in rows if world.person(row["sender_id"]).email in emails]


def threads_by(world: World, rows: list[Row], emails: set[str]) -> list[Row]:
    """The threads whose first email is from one of these addresses."""
    senders = [world.get("gmail.Email", row["email_ids"][0])["sender_id"] for row in rows]
    return [row for row, sender in zip(rows, senders, strict=True) if world.person(sender).email in emails]


def texts(person: Person, receivers: list[Row], message: str) -> tuple[Change, ...]:
    """One text message to each receiver."""
    rows = ((person.id, receiver["phone_number"], message) for receiver in receivers)
    return (added("phone.GlobalTextMessage", "sender_id receiver.phone_number message", rows),)


def new_note(person: Person, title: str, content: str) -> tuple[Change, ...]:
    """A note with that content."""
    return (added("simple_note.Note", "user_id title content", [(person.id, title, content)]),)


def new_file(person: Person, stem: str, content: str) -> tuple[Change, ...]:
    """A text file with that content among the documents."""
    row = (person.id, f"~/documents/{stem}.txt", content)
    return (added("file_system.File", "user_id tilde_path content", [row]),)


def denied(rows: list[Row]) -> tuple[Change, ...]:
    """The changes that deny these payment requests."""
    return (updated("venmo.PaymentRequest", "id", ((row["id"],) for row in rows), "denied_at updated_at"),)


def liked(person: Person, rows: list[Row]) -> Draft:
    """A draft that likes these payments, without parameters."""
    return Draft(
        changes=(added("venmo.TransactionLike", "user_id transaction_id", ((person.id, row["id"]) for row in rows)),),
        side_effects=(SideEffect("venmo.Transaction", touched=("like_count", "updated_at")),),
    )


def starred(rows: list[Row]) -> tuple[Change, ...]:
    """The changes that star these email threads."""
    return (updated("gmail.UserEmailThread", "id starred", ((row["id"], True) for row in rows), "starred updated_at"),)


def _names(people: Sequence[Row]) -> str:
    return "\n".join(sorted(f"{row['first_name']} {row['last_name']}" for row in people))


# --- task families of the standard sandbox ---


def text_relation(world: World, person: Person, rng: random.Random) -> Draft:
    """Text the same message to all contacts of a relationship."""
    relation, message = rng.choice(RELATIONS), rng.choice(WORDS["messages"])
    receivers = beyond_first_page(contacts_of(world, person), lambda row: relation in row["relationships"])
    params: Params = {"relation": relation, "message": message}
    return Draft(params, changes=texts(person, receivers, message), side_effects=TEXTED)


def disable_late_alarms(world: World, person: Person, rng: random.Random) -> Draft:
    """Turn off the alarms after a time of day."""
    time = f"{rng.randint(9, 19):02d}:{rng.choice(['00', '30'])}"
    alarms = world.where("phone.Alarm", user_id=person.id)
    late = beyond_first_page(alarms, lambda alarm: alarm["time"] > time and alarm["enabled"])
    require(all(alarm["time"] != time for alarm in alarms))
    change = updated("phone.Alarm", "id enabled", ((alarm["id"], False) for alarm in late), "enabled")
    return Draft({"time": time}, changes=(change,))


def count_contacts_born(world: World, person: Person, rng: random.Random) -> Draft:
    """Count the contacts born before a date."""
    date = datetime(rng.randint(1960, 1990), rng.randint(1, 12), 1).date().isoformat()
    contacts = contacts_of(world, person)
    friends = related(contacts, "friend")

    def born(rows: list[Row]) -> int:
        return sum(row["birthday"] < date for row in rows)

    answer = born(contacts)
    wrong = {born(contacts[:PAGE_LIMIT]), born(friends), born(friends[:PAGE_LIMIT]), len(contacts) - answer}
    require(answer not in wrong)
    return Draft({"date": date}, answer=answer)


def pin_tagged_notes(world: World, person: Person, rng: random.Random) -> Draft:
    """Pin the notes with a tag."""
    tag = rng.choice(WORDS["note_tags"])
    tagged = beyond_first_page(notes_of(world, person), lambda row: tag in row["tags"])
    # Pinning a pinned note again changes its date, so the evaluation would have to accept both doing it and not.
    require(not any(row["pinned"] for row in tagged))
    change = updated("simple_note.Note", "id pinned", ((row["id"], True) for row in tagged), "pinned updated_at")
    return Draft({"tag": tag}, changes=(change,))


def delete_old_notes(world: World, person: Person, rng: random.Random) -> Draft:
    """Delete the notes created before a date."""
    before = random_past_date(rng)
    old = beyond_first_page(notes_of(world, person), lambda row: row["created_at"] < before)
    change = removed("simple_note.Note", "id title", ((row["id"], row["title"]) for row in old))
    return Draft({"date": before.date().isoformat()}, changes=(change,))


def like_playlist_songs(world: World, person: Person, rng: random.Random) -> Draft:
    """Like every song of a playlist."""
    # A playlist on the first page would be found without reading the later ones.
    playlist = rng.choice(world.where("spotify.Playlist", user_id=person.id)[PAGE_LIMIT:])
    songs = world.where("spotify.PlaylistSong", playlist_id=playlist["id"])
    return Draft(
        {"title": playlist["title"]},
        changes=(added("spotify.SongLike", "user_id song_id", ((person.id, row["song_id"]) for row in songs)),),
        side_effects=(SideEffect("spotify.Song", touched=("like_count",)),),
    )


def count_library_songs(world: World, person: Person, rng: random.Random) -> Draft:
    """Count the songs added to the library since a date."""
    since = random_past_date(rng)
    songs = [row["created_at"] for row in world.where("spotify.UserLibrarySong", user_id=person.id)]
    albums = [row["created_at"] for row in world.where("spotify.UserLibraryAlbum", user_id=person.id)]
    answer = sum(moment >= since for moment in songs)
    wrong = {sum(moment >= since for moment in page) for page in (songs[:PAGE_LIMIT], albums[:PAGE_LIMIT], albums)}
    require(answer not in wrong | {len(songs) - answer, 0})
    return Draft({"date": since.date().isoformat()}, answer=answer)


def longest_library_song(world: World, person: Person, rng: random.Random) -> Draft:
    """Name the longest song of the library."""
    songs = library_of(world, person)
    longest = max(songs, key=lambda song: song["duration"])
    require(longest not in songs[:PAGE_LIMIT])
    return Draft(answer=longest["title"])


def remove_long_songs(world: World, person: Person, rng: random.Random) -> Draft:
    """Remove songs over a length from the library."""
    limit = rng.randrange(200, 400, 10)
    songs = library_of(world, person)
    long = beyond_first_page(songs, lambda song: song["duration"] > limit)
    require(len(long) < len(songs))
    change = removed("spotify.UserLibrarySong", "user_id song_id", ((person.id, song["id"]) for song in long))
    return Draft({"limit": limit}, changes=(change,))


def follow_library_artists(world: World, person: Person, rng: random.Random) -> Draft:
    """Follow the artists of the library's songs, leaving out those already followed."""

    def artists(songs: list[Row]) -> set[int]:
        return {artist for song in songs for artist in song["artist_ids"]}

    library = library_of(world, person)
    followed = {row["artist_id"] for row in world.where("spotify.UserArtistFollowing", user_id=person.id)}
    new = artists(library) - followed
    require(artists(library) & followed and not new <= artists(library[:PAGE_LIMIT]))
    rows = ((person.id, artist) for artist in sorted(new))
    return Draft(changes=(added("spotify.UserArtistFollowing", "user_id artist_id", rows),))


def playlist_of_likes(world: World, person: Person, rng: random.Random) -> Draft:
    """Make a playlist of the liked songs."""
    title = rng.choice(WORDS["new_titles"])
    likes = world.where("spotify.SongLike", user_id=person.id)
    songs = ((person.id, title, row["song_id"]) for row in likes)
    changes = (
        added("spotify.Playlist", "user_id title", [(person.id, title)]),
        added("spotify.PlaylistSong", "playlist.user_id playlist.title song_id", songs),
    )
    return Draft({"title": title}, changes=changes)


def sum_received(world: World, person: Person, rng: random.Random) -> Draft:
    """Add up the money received since a date."""
    since = random_past_date(rng)
    received = world.where("venmo.Transaction", receiver_id=person.id)
    sent = world.where("venmo.Transaction", sender_id=person.id)

    def total(rows: list[Row]) -> float:
        return sum(row["amount"] for row in rows if row["created_at"] >= since)

    answer = total(received)
    earlier = sum(row["amount"] for row in received) - answer
    wrong = {total(received[:PAGE_LIMIT]), total(sent), total(sent[:PAGE_LIMIT]), earlier, 0.0}
    require(answer not in wrong)
    return Draft({"date": since.date().isoformat()}, answer=answer)


def deny_large_requests(world: World, person: Person, rng: random.Random) -> Draft:
    """Deny pending payment requests over an amount."""
    limit = rng.randrange(30, 130, 5)
    large = beyond_first_page(pending_requests(world, person), lambda row: row["amount"] > limit)
    return Draft({"limit": limit}, changes=denied(large), side_effects=NOTIFIED)


def approve_relation_requests(world: World, person: Person, rng: random.Random) -> Draft:
    """Approve the pending payment requests of contacts of a relationship."""
    relation = rng.choice(CLOSE_RELATIONS)
    contacts, pending = contacts_of(world, person), pending_requests(world, person)
    friends = {world.person(row["friend_id"]).email for row in world.where("venmo.Friendship", user_id=person.id)}
    chosen = sent_by(world, pending, emails_of(contacts, relation))
    early = sent_by(world, pending[:PAGE_LIMIT], emails_of(contacts[:PAGE_LIMIT], relation))
    require(chosen not in ([], early, sent_by(world, pending, friends)))
    paid = ((person.id, row["sender_id"], row["amount"], row["description"]) for row in chosen)
    return Draft(
        {"relation": relation},
        changes=(
            updated("venmo.PaymentRequest", "id", ((row["id"],) for row in chosen), "approved_at updated_at"),
            added("venmo.Transaction", "sender_id receiver_id amount description", paid),
        ),
        side_effects=(SideEffect("venmo.User", touched=("venmo_balance",)), *NOTIFIED),
    )


def like_received_payments(world: World, person: Person, rng: random.Random) -> Draft:
    """Like the payments received since a date."""
    since = random_past_date(rng)
    received = world.where("venmo.Transaction", receiver_id=person.id)
    chosen = beyond_first_page(received, lambda row: row["created_at"] >= since)
    return replace(liked(person, chosen), params={"date": since.date().isoformat()})


def complete_due_tasks(world: World, person: Person, rng: random.Random) -> Draft:
    """Complete a Todoist project's tasks due before a date."""
    projects = _latest_first(world.where("todoist.Project", user_id=person.id), "created_at")
    project = rng.choice(projects[PAGE_LIMIT:])
    date = random_past_date(rng, 0, 90)
    tasks = world.where("todoist.Task", project_id=project["id"], is_completed=False)
    due = [(row["id"], True) for row in tasks if row["due_date"] < date]
    require(due)
    change = updated("todoist.Task", "id is_completed", due, "is_completed")
    return Draft({"project": project["name"], "date": date.date().isoformat()}, changes=(change,))


def delete_files(world: World, person: Person, rng: random.Random) -> Draft:
    """Delete a folder's files of one extension."""
    extension = rng.choice(WORDS["extensions"])
    files = [row["path"] for row in world.where("file_system.File", user_id=person.id)]
    gone = [(person.id, path) for path in files if "/downloads/" in path and path.endswith(f".{extension}")]
    require(gone)
    change = removed("file_system.File", "user_id path", gone)
    return Draft({"extension": extension}, changes=(change,), side_effects=FILED)


def star_relation_threads(world: World, person: Person, rng: random.Random) -> Draft:
    """Star the email threads received from contacts of a relationship."""
    relation = rng.choice(CLOSE_RELATIONS)
    contacts, inbox = contacts_of(world, person), inbox_of(world, person)
    chosen = threads_by(world, inbox, emails_of(contacts, relation))
    early = threads_by(world, inbox[:PAGE_LIMIT], emails_of(contacts[:PAGE_LIMIT], relation))
    require(chosen not in ([], early))
    return Draft({"relation": relation}, changes=starred(chosen))


def move_wishes_to_cart(world: World, person: Person, rng: random.Random) -> Draft:
    """Move the cheap products of the wish list to the cart."""
    limit = rng.randrange(30, 120, 5)
    wishes = world.where("amazon.WishListEntry", user_id=person.id)
    cheap = [row for row in wishes if world.get("amazon.Product", row["product_id"])["price"] < limit]
    require(0 < len(cheap) < len(wishes))
    rows = [(person.id, row["product_id"], row["quantity"]) for row in cheap]
    fields = "user_id product_id quantity"
    changes = (removed("amazon.WishListEntry", fields, rows), added("amazon.CartEntry", fields, rows))
    return Draft({"limit": limit}, changes=changes)


def note_of_playlists(world: World, person: Person, rng: random.Random) -> Draft:
    """Write the playlists' titles into a new note."""
    title = rng.choice(WORDS["new_titles"])
    titles = sorted(row["title"] for row in world.where("spotify.Playlist", user_id=person.id))
    return Draft({"title": title}, changes=new_note(person, title, "\n".join(titles)))


def text_note(world: World, person: Person, rng: random.Random) -> Draft:
    """Text a note's content to all contacts of a relationship."""
    note = rng.choice(notes_of(world, person)[PAGE_LIMIT:])
    relation = rng.choice(RELATIONS)
    receivers = related(contacts_of(world, person), relation)
    require(receivers)
    params: Params = {"title": note["title"], "relation": relation}
    return Draft(params, changes=texts(person, receivers, note["content"]), side_effects=TEXTED)


def file_of_songs(world: World, person: Person, rng: random.Random) -> Draft:
    """Write the library's song titles into a file."""
    stem = f"songs_{rng.randint(1, 99)}"
    content = "\n".join(sorted(song["title"] for song in library_of(world, person)))
    return Draft({"stem": stem}, changes=new_file(person, stem, content), side_effects=FILED)


# --- the hard variety ---


def _requests(world: World, person: Person, rng: random.Random) -> tuple[Params, list[Row], list[Row]]:
    """Parameters, the requests that they select, and the senders as contacts."""
    relation, limit = rng.choice(CLOSE_RELATIONS), rng.randrange(20, 120, 5)
    contacts, pending = contacts_of(world, person), pending_requests(world, person)

    def by(requests: list[Row], people: list[Row]) -> tuple[list[Row], list[Row]]:
        chosen = sent_by(world, requests, emails_of(people, relation))
        senders = {world.person(row["sender_id"]).email for row in chosen}
        return chosen, [row for row in contacts if row["email"] in senders]

    over = [row for row in pending if row["amount"] > limit]
    requests, senders = by(over, contacts)
    _, of_first_pages = by([row for row in over if row in pending[:PAGE_LIMIT]], contacts[:PAGE_LIMIT])
    _, of_smaller = by([row for row in pending if row["amount"] < limit], contacts)
    # There must be smaller requests too, or the condition on the amount would select nothing.
    require(of_smaller and senders not in ([], of_first_pages, of_smaller))
    return {"relation": relation, "limit": limit}, requests, senders


def deny_relation_requests(world: World, person: Person, rng: random.Random) -> Draft:
    """Deny the chosen payment requests."""
    params, requests, _ = _requests(world, person, rng)
    return Draft(params, changes=denied(requests), side_effects=NOTIFIED)


def text_senders(world: World, person: Person, rng: random.Random) -> Draft:
    """Text the senders of the chosen requests."""
    params, _, senders = _requests(world, person, rng)
    message = rng.choice(WORDS["messages"])
    return Draft(params | {"message": message}, changes=texts(person, senders, message), side_effects=TEXTED)


def note_of_senders(world: World, person: Person, rng: random.Random) -> Draft:
    """Write the senders' names into a new note."""
    params, _, senders = _requests(world, person, rng)
    title = rng.choice(WORDS["new_titles"])
    return Draft(params | {"title": title}, changes=new_note(person, title, _names(senders)))


def file_of_senders(world: World, person: Person, rng: random.Random) -> Draft:
    """Write the senders' names into a new file."""
    params, _, senders = _requests(world, person, rng)
    stem = f"people_{rng.randint(1, 99)}"
    return Draft(params | {"stem": stem}, changes=new_file(person, stem, _names(senders)), side_effects=FILED)


def _payments(world: World, person: Person, rng: random.Random) -> tuple[Params, list[Row]]:
    """Parameters and the payments that they select."""

    def total(rows: list[Row]) -> float:
        return sum(row["amount"] for row in rows)

    relation, since = rng.choice(CLOSE_RELATIONS), random_past_date(rng)
    contacts = contacts_of(world, person)
    received = world.where("venmo.Transaction", receiver_id=person.id)
    payments = sent_by(world, received, emails_of(contacts, relation))
    chosen = [row for row in payments if row["created_at"] >= since]
    early = [row for row in payments if row not in chosen]
    first_page = sent_by(world, received[:PAGE_LIMIT], emails_of(contacts[:PAGE_LIMIT], relation))
    of_first_pages = [row for row in first_page if row in chosen]
    require(chosen and early and total(chosen) not in (total(of_first_pages), total(early)))
    return {"relation": relation, "date": since.date().isoformat()}, chosen


def like_relation_payments(world: World, person: Person, rng: random.Random) -> Draft:
    """Like the chosen payments."""
    params, chosen = _payments(world, person, rng)
    return replace(liked(person, chosen), params=params)


def sum_relation_payments(world: World, person: Person, rng: random.Random) -> Draft:
    """Add up the chosen payments."""
    params, chosen = _payments(world, person, rng)
    return Draft(params, answer=sum(row["amount"] for row in chosen))


def note_of_long_songs(world: World, person: Person, rng: random.Random) -> Draft:
    """Write the titles of the library's long songs into a new note."""
    title, limit = rng.choice(WORDS["new_titles"]), rng.randrange(200, 400, 10)
    songs = library_of(world, person)
    long = beyond_first_page(songs, lambda song: song["duration"] > limit)
    require(len(long) < len(songs))
    content = "\n".join(sorted(song["title"] for song in long))
    return Draft({"title": title, "limit": limit}, changes=new_note(person, title, content))


def text_longest_song(world: World, person: Person, rng: random.Random) -> Draft:
    """Text the title of the library's longest song to contacts of a relationship."""
    relation, songs = rng.choice(CLOSE_RELATIONS), library_of(world, person)
    longest = max(songs, key=lambda song: song["duration"])
    receivers = related(contacts_of(world, person), relation)
    require(receivers and longest not in songs[:PAGE_LIMIT])
    return Draft({"relation": relation}, changes=texts(person, receivers, longest["title"]), side_effects=TEXTED)


def file_of_contacts(world: World, person: Person, rng: random.Random) -> Draft:
    """Write the names of contacts of a relationship born before a date into a new file."""
    params, people = _born(world, person, rng)
    stem = f"people_{rng.randint(1, 99)}"
    return Draft(params | {"stem": stem}, changes=new_file(person, stem, _names(people)), side_effects=FILED)


def _born(world: World, person: Person, rng: random.Random) -> tuple[Params, list[Row]]:
    """Parameters and the contacts that they select."""
    relation = rng.choice(CLOSE_RELATIONS)
    date = datetime(rng.randint(1960, 1990), rng.randint(1, 12), 1).date().isoformat()
    contacts = contacts_of(world, person)
    people = beyond_first_page(contacts, lambda row: relation in row["relationships"] and row["birthday"] < date)
    return {"relation": relation, "date": date}, people


def star_recent_threads(world: World, person: Person, rng: random.Random) -> Draft:
    """Star the threads received since a date from contacts of a relationship."""
    relation, since = rng.choice(CLOSE_RELATIONS), random_past_date(rng, 20, 180)
    contacts, inbox = contacts_of(world, person), inbox_of(world, person)
    threads = threads_by(world, inbox, emails_of(contacts, relation))
    chosen = [row for row in threads if row["created_at"] >= since]
    early = [row for row in threads if row not in chosen]
    first_page = threads_by(world, inbox[:PAGE_LIMIT], emails_of(contacts[:PAGE_LIMIT], relation))
    require(chosen and early and chosen != [row for row in first_page if row in chosen])
    return Draft({"relation": relation, "date": since.date().isoformat()}, changes=starred(chosen))


def text_note_born(world: World, person: Person, rng: random.Random) -> Draft:
    """Text a note's content to contacts of a relationship born before a date."""
    note = rng.choice(notes_of(world, person)[PAGE_LIMIT:])
    params, people = _born(world, person, rng)
    changes = texts(person, people, note["content"])
    return Draft(params | {"title": note["title"]}, changes=changes, side_effects=TEXTED)

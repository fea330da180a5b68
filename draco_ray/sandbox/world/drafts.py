"""Drafts of the standard variety's families: a task's parameters, and its ground truth from the world's rows.

A draft is None where its choice of parameters makes no good task: a fatal fault would do no harm, or nothing is to do.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta

from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, RELATIONS, WORDS, Person, Row, World
from draco_ray.sandbox.world.scripts import Change, Draft, SideEffect

CLOSE_RELATIONS = ("coworker", "sibling", "roommate")
"""Relations that no other app has a notion of (Venmo has friends of its own)."""


def contacts_of(world: World, person: Person) -> list[Row]:
    """A person's contacts in the order of the API: latest first."""
    return sorted(world.where("phone.Contact", user_id=person.id), key=lambda row: row["created_at"], reverse=True)


def related(rows: list[Row], relation: str) -> list[Row]:
    """The contacts of that relationship."""
    return [row for row in rows if relation in row["relationships"]]


def text_change(person: Person, receivers: list[Row], message: str) -> tuple[Change, ...]:
    """One text message to each receiver."""
    fields = ("sender_id", "receiver.phone_number", "message")
    rows = tuple((person.id, receiver["phone_number"], message) for receiver in receivers)
    return (Change("phone.GlobalTextMessage", fields, added=rows),)


def text_relation(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Text the same message to all contacts of a relationship."""
    relation, message = rng.choice(RELATIONS), rng.choice(WORDS["messages"])
    contacts = contacts_of(world, person)
    receivers = related(contacts, relation)
    if len(related(contacts[:PAGE_LIMIT], relation)) == len(receivers):
        return None
    return Draft(
        params={"relation": relation, "message": message},
        changes=text_change(person, receivers, message),
        side_effects=(SideEffect("phone.UserTextMessage", added=True),),
    )


def disable_late_alarms(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Turn off the alarms after a time of day."""
    time = f"{rng.randint(9, 19):02d}:{rng.choice(['00', '30'])}"
    alarms = world.where("phone.Alarm", user_id=person.id)
    late = [alarm for alarm in alarms if alarm["time"] > time and alarm["enabled"]]
    if all(alarm in alarms[:PAGE_LIMIT] for alarm in late) or any(alarm["time"] == time for alarm in alarms):
        return None
    updated = tuple((alarm["id"], False) for alarm in late)
    return Draft(
        params={"time": time},
        changes=(Change("phone.Alarm", ("id", "enabled"), updated=updated, touched=("enabled",)),),
    )


def count_contacts_born(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Count the contacts born before a date."""
    date = datetime(rng.randint(1960, 1990), rng.randint(1, 12), 1).date().isoformat()
    contacts = contacts_of(world, person)
    friends = related(contacts, "friend")

    def born(rows: list[Row]) -> int:
        return sum(row["birthday"] < date for row in rows)

    answer = born(contacts)
    wrong = {born(contacts[:PAGE_LIMIT]), born(friends), born(friends[:PAGE_LIMIT]), len(contacts) - answer}
    return None if answer in wrong else Draft(params={"date": date}, answer=answer)


def notes_of(world: World, person: Person) -> list[Row]:
    """A person's notes in the order of the API: latest update first."""
    rows = world.where("simple_note.Note", user_id=person.id)
    return sorted(rows, key=lambda row: row["updated_at"], reverse=True)


def pin_tagged_notes(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Pin the notes with a tag."""
    tag = rng.choice(WORDS["note_tags"])
    notes = notes_of(world, person)
    tagged = [row for row in notes if tag in row["tags"]]
    # Pinning a pinned note again changes its date, so both doing and leaving it would have to be right.
    if all(row in notes[:PAGE_LIMIT] for row in tagged) or any(row["pinned"] for row in tagged):
        return None
    updated = tuple((row["id"], True) for row in tagged)
    change = Change("simple_note.Note", ("id", "pinned"), updated=updated, touched=("pinned", "updated_at"))
    return Draft({"tag": tag}, changes=(change,))


def delete_old_notes(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Delete the notes created before a date."""
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


def _song_ids(world: World, table: str, **equal: int) -> list[int]:
    return [row["song_id"] for row in world.where(table, **equal)]


def like_playlist_songs(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Like every song of a playlist."""
    # A playlist on the first page would be found without reading the later ones.
    playlist = rng.choice(world.where("spotify.Playlist", user_id=person.id)[PAGE_LIMIT:])
    songs = _song_ids(world, "spotify.PlaylistSong", playlist_id=playlist["id"])
    return Draft(
        params={"title": playlist["title"]},
        changes=(Change("spotify.SongLike", ("user_id", "song_id"), added=tuple((person.id, song) for song in songs)),),
        side_effects=(SideEffect("spotify.Song", touched=("like_count",)),),
    )


def count_library_songs(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Count the songs added to the library since a date."""
    since = NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))
    songs = [row["created_at"] for row in world.where("spotify.UserLibrarySong", user_id=person.id)]
    albums = [row["created_at"] for row in world.where("spotify.UserLibraryAlbum", user_id=person.id)]
    answer = sum(moment >= since for moment in songs)
    first_page = songs[:PAGE_LIMIT], albums[:PAGE_LIMIT]
    wrong = {sum(moment >= since for moment in page) for page in (*first_page, albums)}
    if answer in wrong or answer == len(songs) - answer or answer == 0:
        return None
    return Draft(params={"date": since.date().isoformat()}, answer=answer)


def longest_library_song(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Name the longest song of the library."""
    songs = [world.get("spotify.Song", s) for s in _song_ids(world, "spotify.UserLibrarySong", user_id=person.id)]
    longest = max(songs, key=lambda song: song["duration"])
    return None if longest in songs[:PAGE_LIMIT] else Draft(answer=longest["title"])


def remove_long_songs(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Remove songs over a length from the library."""
    limit = rng.randrange(200, 400, 10)
    songs = [world.get("spotify.Song", s) for s in _song_ids(world, "spotify.UserLibrarySong", user_id=person.id)]
    long = [song["id"] for song in songs if song["duration"] > limit]
    late = [song["id"] for song in songs[PAGE_LIMIT:] if song["duration"] > limit]
    if not late or len(long) == len(songs):
        return None
    return Draft(
        params={"limit": limit},
        changes=(
            Change(
                "spotify.UserLibrarySong",
                ("user_id", "song_id"),
                removed=tuple((person.id, song) for song in long),
            ),
        ),
    )


def follow_library_artists(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Follow the artists of the library's songs, leaving out those already followed."""

    def artists(songs: list[int]) -> set[int]:
        return {artist for song in songs for artist in world.get("spotify.Song", song)["artist_ids"]}

    library = _song_ids(world, "spotify.UserLibrarySong", user_id=person.id)
    followed = {row["artist_id"] for row in world.where("spotify.UserArtistFollowing", user_id=person.id)}
    new = artists(library) - followed
    if not artists(library) & followed or new <= artists(library[:PAGE_LIMIT]):
        return None
    return Draft(
        changes=(
            Change(
                "spotify.UserArtistFollowing",
                ("user_id", "artist_id"),
                added=tuple((person.id, artist) for artist in sorted(new)),
            ),
        ),
    )


def playlist_of_likes(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Make a playlist of the liked songs."""
    title = rng.choice(WORDS["new_titles"])
    liked = _song_ids(world, "spotify.SongLike", user_id=person.id)
    return Draft(
        params={"title": title},
        changes=(
            Change("spotify.Playlist", ("user_id", "title"), added=((person.id, title),)),
            Change(
                "spotify.PlaylistSong",
                ("playlist.user_id", "playlist.title", "song_id"),
                added=tuple((person.id, title, song) for song in liked),
            ),
        ),
    )


def pending_requests(world: World, person: Person) -> list[Row]:
    """Payment requests a person has not answered, in the order of the API: latest first."""
    rows = world.where("venmo.PaymentRequest", receiver_id=person.id, approved_at=None, denied_at=None)
    return sorted(rows, key=lambda row: row["created_at"], reverse=True)


def sum_received(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Add up the money received since a date."""
    since = NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))
    received = world.where("venmo.Transaction", receiver_id=person.id)
    sent = world.where("venmo.Transaction", sender_id=person.id)

    def total(rows: list[Row]) -> float:
        return sum(row["amount"] for row in rows if row["created_at"] >= since)

    answer = total(received)
    earlier = sum(row["amount"] for row in received) - answer
    wrong = {total(received[:PAGE_LIMIT]), total(sent), total(sent[:PAGE_LIMIT]), earlier, 0.0}
    return None if answer in wrong else Draft(params={"date": since.date().isoformat()}, answer=answer)


def deny_large_requests(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Deny pending payment requests over an amount."""
    limit = rng.randrange(30, 130, 5)
    pending = pending_requests(world, person)
    large = [row["id"] for row in pending if row["amount"] > limit]
    early = [row["id"] for row in pending[:PAGE_LIMIT] if row["amount"] > limit]
    if large == early:
        return None
    change = Change(
        "venmo.PaymentRequest", ("id",), updated=tuple((i,) for i in large), touched=("denied_at", "updated_at")
    )
    return Draft({"limit": limit}, changes=(change,), side_effects=(SideEffect("venmo.Notification", added=True),))


def approve_relation_requests(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Approve the pending payment requests of contacts of a relationship."""
    relation = rng.choice(CLOSE_RELATIONS)
    contacts, pending = contacts_of(world, person), pending_requests(world, person)

    def by(rows: list[Row], emails: set[str]) -> list[Row]:
        return [row for row in rows if world.person(row["sender_id"]).email in emails]

    emails = {row["email"] for row in related(contacts, relation)}
    early = {row["email"] for row in related(contacts[:PAGE_LIMIT], relation)}
    friends = {world.person(row["friend_id"]).email for row in world.where("venmo.Friendship", user_id=person.id)}
    chosen = by(pending, emails)
    if chosen in ([], by(pending[:PAGE_LIMIT], early), by(pending, friends)):
        return None
    fields = ("sender_id", "receiver_id", "amount", "description")
    paid = tuple((person.id, row["sender_id"], row["amount"], row["description"]) for row in chosen)
    return Draft(
        {"relation": relation},
        changes=(
            Change(
                "venmo.PaymentRequest",
                ("id",),
                updated=tuple((row["id"],) for row in chosen),
                touched=("approved_at", "updated_at"),
            ),
            Change("venmo.Transaction", fields, added=paid),
        ),
        side_effects=(
            SideEffect("venmo.User", touched=("venmo_balance",)),
            SideEffect("venmo.Notification", added=True),
        ),
    )


def like_received_payments(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Like the payments received since a date."""
    since = NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))
    received = world.where("venmo.Transaction", receiver_id=person.id)
    chosen = [row["id"] for row in received if row["created_at"] >= since]
    early = [row["id"] for row in received[:PAGE_LIMIT] if row["created_at"] >= since]
    if chosen == early:
        return None
    likes = tuple((person.id, transaction) for transaction in chosen)
    return Draft(
        {"date": since.date().isoformat()},
        changes=(Change("venmo.TransactionLike", ("user_id", "transaction_id"), added=likes),),
        side_effects=(SideEffect("venmo.Transaction", touched=("like_count", "updated_at")),),
    )


def complete_due_tasks(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Complete a Todoist project's tasks due before a date."""
    projects = world.where("todoist.Project", user_id=person.id)
    projects.sort(key=lambda row: row["created_at"], reverse=True)
    project = rng.choice(projects[PAGE_LIMIT:])
    date = NOW.replace(hour=0) - timedelta(days=rng.randrange(0, 90))
    tasks = world.where("todoist.Task", project_id=project["id"], is_completed=False)
    due = [row["id"] for row in tasks if row["due_date"] < date]
    if not due:
        return None
    change = Change(
        "todoist.Task",
        ("id", "is_completed"),
        updated=tuple((task, True) for task in due),
        touched=("is_completed",),
    )
    return Draft({"project": project["name"], "date": date.date().isoformat()}, changes=(change,))


def delete_files(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Delete a folder's files of one extension."""
    extension = rng.choice(WORDS["extensions"])
    files = world.where("file_system.File", user_id=person.id)
    gone = [r["path"] for r in files if "/downloads/" in r["path"] and r["path"].endswith(f".{extension}")]
    if not gone:
        return None
    removed = tuple((person.id, path) for path in gone)
    return Draft(
        {"extension": extension},
        changes=(Change("file_system.File", ("user_id", "path"), removed=removed),),
        side_effects=(SideEffect("file_system.Directory", touched=("updated_at",)),),
    )


def star_relation_threads(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Star the email threads received from contacts of a relationship."""
    relation = rng.choice(CLOSE_RELATIONS)
    contacts = contacts_of(world, person)
    inbox = world.where("gmail.UserEmailThread", user_id=person.id, incoming=True)
    inbox.sort(key=lambda row: row["updated_at"], reverse=True)

    def by(rows: list[Row], people: list[Row]) -> list[int]:
        emails = {row["email"] for row in related(people, relation)}
        senders = [world.get("gmail.Email", row["email_ids"][0])["sender_id"] for row in rows]
        return [row["id"] for row, sender in zip(rows, senders, strict=True) if world.person(sender).email in emails]

    chosen = by(inbox, contacts)
    if chosen in ([], by(inbox[:PAGE_LIMIT], contacts[:PAGE_LIMIT])):
        return None
    change = Change(
        "gmail.UserEmailThread",
        ("id", "starred"),
        updated=tuple((thread, True) for thread in chosen),
        touched=("starred", "updated_at"),
    )
    return Draft({"relation": relation}, changes=(change,))


def move_wishes_to_cart(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Move the cheap products of the wish list to the cart."""
    limit = rng.randrange(30, 120, 5)
    wishes = world.where("amazon.WishListEntry", user_id=person.id)
    cheap = [row for row in wishes if world.get("amazon.Product", row["product_id"])["price"] < limit]
    if not cheap or len(cheap) == len(wishes):
        return None
    rows = tuple((person.id, row["product_id"], row["quantity"]) for row in cheap)
    fields = ("user_id", "product_id", "quantity")
    return Draft(
        {"limit": limit},
        changes=(
            Change("amazon.WishListEntry", fields, removed=rows),
            Change("amazon.CartEntry", fields, added=rows),
        ),
    )


def note_of_playlists(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Write the playlists' titles into a new note."""
    title = rng.choice(WORDS["new_titles"])
    content = "\n".join(sorted(row["title"] for row in world.where("spotify.Playlist", user_id=person.id)))
    change = Change("simple_note.Note", ("user_id", "title", "content"), added=((person.id, title, content),))
    return Draft({"title": title}, changes=(change,))


def text_note(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Text a note's content to all contacts of a relationship."""
    note = rng.choice(notes_of(world, person)[PAGE_LIMIT:])
    relation = rng.choice(RELATIONS)
    receivers = related(contacts_of(world, person), relation)
    if not receivers:
        return None
    return Draft(
        {"title": note["title"], "relation": relation},
        changes=text_change(person, receivers, note["content"]),
        side_effects=(SideEffect("phone.UserTextMessage", added=True),),
    )


def file_of_songs(world: World, person: Person, rng: random.Random) -> Draft | None:
    """Write the library's song titles into a file."""
    stem = f"songs_{rng.randint(1, 99)}"
    library = world.where("spotify.UserLibrarySong", user_id=person.id)
    content = "\n".join(sorted(world.get("spotify.Song", row["song_id"])["title"] for row in library))
    row = (person.id, f"~/documents/{stem}.txt", content)
    return Draft(
        {"stem": stem},
        changes=(Change("file_system.File", ("user_id", "tilde_path", "content"), added=(row,)),),
        side_effects=(SideEffect("file_system.Directory", touched=("updated_at",)),),
    )

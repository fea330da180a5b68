"""Families of the hard variety: two or three apps a task, mostly two lists to be read whole and two conditions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta

from draco_ray.sandbox.world import words
from draco_ray.sandbox.world.families.phone import (
    CLOSE_RELATIONS,
    contacts_of,
    related,
    select_people_cell,
    text_change,
)
from draco_ray.sandbox.world.families.simple_note import notes_of
from draco_ray.sandbox.world.families.venmo import pending_requests
from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, Person, Row, World
from draco_ray.sandbox.world.scripts import (
    DATE,
    DOLLARS,
    FATAL,
    NUMBER,
    RELATION,
    TITLE,
    Change,
    Draft,
    Family,
    Fault,
    Faults,
    SideEffect,
    cell,
    fetch_cells,
    parameters_cell,
)

TEXTED = (SideEffect("phone.UserTextMessage", added=True),)
FILED = (SideEffect("file_system.Directory", touched=("updated_at",)),)

_COLLECT_EMAILS = 'emails = [c["email"] for c in people]'
_SEND_TEXTS = cell(
    "Send the text messages.",
    "for c in people:",
    '    number = c["phone_number"]',
    "    apis.phone.send_text_message(phone_number=number, message=message, access_token=phone_token)",
)
_CREATE_NOTE = cell(
    "Create the note.", "apis.simple_note.create_note(title=title, content=content, access_token=simple_note_token)"
)
_CREATE_FILE = cell(
    "Create the file.",
    "apis.file_system.create_file(file_path=path, content=content, access_token=file_system_token)",
)


def people_cells(faults: Faults) -> list[str]:
    """Read the contacts and keep those of the task's relationship, as ``people``."""
    return [*fetch_cells("contacts", "phone.search_contacts", faults), select_people_cell(frozenset())]


def requests_cells(faults: Faults) -> list[str]:
    """Read the pending payment requests: the second list of a task, or the wrong side of it."""
    side = "sent" if Fault.WRONG_SOURCE in faults else "received"
    return fetch_cells(
        f"{side} requests",
        f"venmo.show_{side}_payment_requests",
        faults & {Fault.FIRST_PAGE_ONLY},
        extra='status="pending", ',
    )


def payments_cells(faults: Faults) -> list[str]:
    """Read the payments: the second list of a task, or the wrong side of it."""
    side = "sent" if Fault.WRONG_SOURCE in faults else "received"
    return fetch_cells(
        f"{side} payments", "venmo.show_transactions", faults & {Fault.FIRST_PAGE_ONLY}, f'direction="{side}", '
    )


def _over(faults: Faults) -> str:
    """The comparison with an amount, reversed with the fault WRONG_FILTER."""
    return "<" if Fault.WRONG_FILTER in faults else ">"


def _not_before(faults: Faults) -> str:
    """The comparison with a first date, reversed with the fault WRONG_FILTER."""
    return "<" if Fault.WRONG_FILTER in faults else ">="


def _names(people: Sequence[Row]) -> str:
    return "\n".join(sorted(f"{row['first_name']} {row['last_name']}" for row in people))


_WRITE_NAMES = cell(
    "Write the list.",
    'names = [c["first_name"] + " " + c["last_name"] for c in people]',
    'content = "\\n".join(sorted(names))',
    "print(len(content))",
)


def _born_before(date: str, people: Sequence[Row]) -> list[Row]:
    return [row for row in people if row["birthday"] < date]


def _since(rng: random.Random) -> datetime:
    return NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))


class _Requests(Family):
    """Pending payment requests over an amount from contacts of a relationship."""

    variety = "hard"
    difficulty = 3
    fatal = FATAL

    def choose(
        self, world: World, person: Person, rng: random.Random
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


class DenyRelationRequests(_Requests):
    """Deny them."""

    name = "deny_relation_requests"
    apps = ("phone", "venmo")
    wordings = (
        "Deny all pending Venmo payment requests of more than ${limit} from my {relation}s, as saved in my phone "
        "contacts.",
        "My {relation}s are in my phone contacts. Deny every pending Venmo payment request above ${limit} that they "
        "have sent me.",
        "Look up my {relation}s in my phone contacts and deny each pending Venmo request over ${limit} from them.",
        "On Venmo, reject all pending payment requests from my {relation}s (see my phone contacts) that ask me for "
        "more than ${limit}.",
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(relation=RELATION, limit=DOLLARS),
            *people_cells(faults),
            *requests_cells(faults),
            cell(
                "Select the requests.",
                _COLLECT_EMAILS,
                f'requests = [r for r in rows if r["sender"]["email"] in emails and r["amount"] {_over(faults)} limit]',
                "print(len(requests))",
            ),
            cell(
                "Deny the requests.",
                "for r in requests:",
                '    request_id = r["payment_request_id"]',
                "    apis.venmo.deny_payment_request(payment_request_id=request_id, access_token=venmo_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        if (found := self.choose(world, person, rng)) is None:
            return None
        params, requests, _ = found
        change = Change(
            "venmo.PaymentRequest",
            ("id",),
            updated=tuple((row["id"],) for row in requests),
            touched=("denied_at", "updated_at"),
        )
        return Draft(params, changes=(change,), side_effects=(SideEffect("venmo.Notification", added=True),))


class _OfSenders(_Requests):
    """What is done with the contacts who sent such requests."""

    def sender_cells(self, faults: Faults) -> list[str]:
        """Read both lists and keep the senders among the contacts, as ``people``."""
        return [
            *people_cells(faults),
            *requests_cells(faults),
            cell(
                "Select the senders.",
                f'emails = [r["sender"]["email"] for r in rows if r["amount"] {_over(faults)} limit]',
                'people = [c for c in people if c["email"] in emails]',
                "print(len(people))",
            ),
        ]


class TextSenders(_OfSenders):
    """Text them."""

    name = "text_senders"
    apps = ("phone", "venmo")
    wordings = (
        'Text "{message}" to each of my {relation}s who has sent me a pending Venmo request of more than ${limit}.',
        'Send the text message "{message}" to all my {relation}s in my phone contacts from whom I have received a '
        "pending Venmo payment request above ${limit}.",
        "Some of my {relation}s have sent me pending Venmo requests over ${limit}. Text each of them, saying exactly "
        '"{message}"',
        "Please find my {relation}s who have sent me a pending payment request of more than ${limit} on Venmo, and "
        'send every one of them the text message "{message}"',
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(message=TITLE, relation=RELATION, limit=DOLLARS),
            *self.sender_cells(faults),
            _SEND_TEXTS,
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        if (found := self.choose(world, person, rng)) is None:
            return None
        params, _, senders = found
        message = rng.choice(words.MESSAGES)
        return Draft(params | {"message": message}, changes=text_change(person, senders, message), side_effects=TEXTED)


class NoteOfSenders(_OfSenders):
    """Write their names into a new note."""

    name = "note_of_senders"
    apps = ("phone", "venmo", "simple_note")
    wordings = (
        'Create a note titled "{title}" in Simple Note that lists the names of all my {relation}s in my phone contacts '
        "who have sent me a pending Venmo request of more than ${limit}, one per line, in alphabetical order.",
        "Write the names of the {relation}s in my phone contacts who have sent me pending Venmo requests above "
        '${limit} into a new Simple Note note "{title}", one per line and sorted alphabetically.',
        'Make a new note "{title}" in Simple Note with the full names of the {relation}s in my phone contacts from '
        "whom I have received a pending Venmo request over ${limit}, each on its own line, sorted alphabetically.",
        'I want a new note titled "{title}" in Simple Note. It has one line for each of my {relation}s who has sent me '
        "a pending Venmo request of more than ${limit}: the name as in my phone contacts, in alphabetical order.",
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(title=TITLE, relation=RELATION, limit=DOLLARS),
            *self.sender_cells(faults),
            _WRITE_NAMES,
            _CREATE_NOTE,
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        if (found := self.choose(world, person, rng)) is None:
            return None
        params, _, senders = found
        title = rng.choice(words.NEW_TITLES)
        row = (person.id, title, _names(senders))
        return Draft(
            params | {"title": title},
            changes=(Change("simple_note.Note", ("user_id", "title", "content"), added=(row,)),),
        )


class FileOfSenders(_OfSenders):
    """Write their names into a new file."""

    name = "file_of_senders"
    apps = ("phone", "venmo", "file_system")
    splits = ("test_challenge",)
    wordings = (
        'Create the new file "~/documents/{stem}.txt" in my file system with the names of all my {relation}s in my '
        "phone contacts who have sent me a pending Venmo request of more than ${limit}, one per line, in alphabetical "
        "order.",
        'Make a file "~/documents/{stem}.txt" in my file system that lists the names of my {relation}s (see my phone '
        "contacts) from whom I have received a pending Venmo request above ${limit}, each on its own line and sorted "
        "alphabetically.",
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(path=TITLE, relation=RELATION, limit=DOLLARS),
            *self.sender_cells(faults),
            _WRITE_NAMES,
            _CREATE_FILE,
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        if (found := self.choose(world, person, rng)) is None:
            return None
        params, _, senders = found
        stem = f"people_{rng.randint(1, 99)}"
        row = (person.id, f"~/documents/{stem}.txt", _names(senders))
        return Draft(
            params | {"stem": stem},
            changes=(Change("file_system.File", ("user_id", "tilde_path", "content"), added=(row,)),),
            side_effects=FILED,
        )


class _Payments(Family):
    """Payments received since a date from contacts of a relationship."""

    variety = "hard"
    apps = ("phone", "venmo")
    difficulty = 3
    fatal = FATAL

    def payment_cells(self, faults: Faults) -> list[str]:
        """Read both lists and keep the payments, as ``payments``."""
        return [
            parameters_cell(relation=RELATION, date=DATE),
            *people_cells(faults),
            *payments_cells(faults),
            cell(
                "Select the payments.",
                _COLLECT_EMAILS,
                f'payments = [r for r in rows if r["created_at"] {_not_before(faults)} date]',
                'payments = [r for r in payments if r["sender"]["email"] in emails]',
                "print(len(payments))",
            ),
        ]

    def choose(self, world: World, person: Person, rng: random.Random) -> tuple[dict[str, str | int], list[Row]] | None:
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


class LikeRelationPayments(_Payments):
    """Like them."""

    name = "like_relation_payments"
    wordings = (
        "Like all the Venmo payments that I received from my {relation}s on or after {date}. My phone contacts say who "
        "they are.",
        "On Venmo, like every payment that my {relation}s, as saved in my phone contacts, have sent me since {date}, "
        "that day included.",
        "Look up my {relation}s in my phone contacts and like each Venmo payment I received from them on {date} or "
        "later.",
        "Give a like to all Venmo transactions in which I received money from one of my {relation}s (see my phone "
        "contacts) on or after {date}.",
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            *self.payment_cells(faults),
            cell(
                "Like the payments.",
                "for r in payments:",
                '    apis.venmo.like_transaction(transaction_id=r["transaction_id"], access_token=venmo_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        if (found := self.choose(world, person, rng)) is None:
            return None
        params, chosen = found
        likes = tuple((person.id, row["id"]) for row in chosen)
        return Draft(
            params,
            changes=(Change("venmo.TransactionLike", ("user_id", "transaction_id"), added=likes),),
            side_effects=(SideEffect("venmo.Transaction", touched=("like_count", "updated_at")),),
        )


class SumRelationPayments(_Payments):
    """Add them up."""

    name = "sum_relation_payments"
    answers = True
    wordings = (
        "How much money have I received on Venmo in total from my {relation}s, as saved in my phone contacts, on or "
        "after {date}?",
        "Add up all the Venmo payments I received from my {relation}s since {date}, that day included. How much is it? "
        "My phone contacts say who they are.",
        "What is the total amount of the Venmo payments that I received from my {relation}s (see my phone contacts) on "
        "{date} or later?",
        "Tell me the total of all Venmo transactions on or after {date} in which I received money from one of the "
        "{relation}s in my phone contacts.",
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            *self.payment_cells(faults),
            cell("Add up the amounts.", 'answer = sum(r["amount"] for r in payments)', "print(answer)"),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        if (found := self.choose(world, person, rng)) is None:
            return None
        params, chosen = found
        return Draft(params, answer=sum(row["amount"] for row in chosen))


class NoteOfLongSongs(Family):
    """Write the titles of the library's long songs into a new note."""

    name = "note_of_long_songs"
    variety = "hard"
    apps = ("spotify", "simple_note")
    difficulty = 3
    fatal = FATAL
    wordings = (
        'Create a note titled "{title}" in Simple Note that lists the titles of all songs in my Spotify song library '
        "longer than {limit} seconds, one per line, in alphabetical order.",
        "Write the titles of all songs in my Spotify song library that last more than {limit} seconds into a new "
        'Simple Note note "{title}", each on its own line and sorted alphabetically.',
        'Make a new note "{title}" in Simple Note with the title of every song longer than {limit} seconds in my '
        "Spotify song library, one per line, sorted alphabetically.",
        'I want a new note titled "{title}" in Simple Note: the titles of the songs in my Spotify song library that '
        "are longer than {limit} seconds, each on its own line, in alphabetical order.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "song library", "spotify.show_song_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "liked songs", "spotify.show_liked_songs"
        sign = "<" if Fault.WRONG_FILTER in faults else ">"
        return [
            parameters_cell(title=TITLE, limit=NUMBER),
            *fetch_cells(what, api, faults),
            cell("Select the songs.", f'songs = [s for s in rows if s["duration"] {sign} limit]', "print(len(songs))"),
            cell("Write the list.", 'content = "\\n".join(sorted(s["title"] for s in songs))', "print(len(content))"),
            _CREATE_NOTE,
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        title, limit = rng.choice(words.NEW_TITLES), rng.randrange(200, 400, 10)
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


class TextLongestSong(Family):
    """Text the title of the library's longest song to contacts of a relationship."""

    name = "text_longest_song"
    variety = "hard"
    apps = ("spotify", "phone")
    difficulty = 3
    fatal = FATAL
    wordings = (
        "Text the title of the longest song in my Spotify song library to each of my {relation}s.",
        "Find the longest song in my Spotify song library and send its title as a text message to all my {relation}s.",
        "All of my {relation}s should get a text message with just the title of the song that lasts the longest in my "
        "Spotify song library. Send it to them.",
        "Please text the title of the song with the longest duration in my Spotify song library to every one of my "
        "{relation}s.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "song library", "spotify.show_song_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "liked songs", "spotify.show_liked_songs"
        pick = "min" if Fault.WRONG_FILTER in faults else "max"
        return [
            parameters_cell(relation=RELATION),
            *fetch_cells(what, api, faults),
            cell(
                "Find the longest song.",
                f'message = {pick}(rows, key=lambda s: s["duration"])["title"]',
                "print(message)",
            ),
            *people_cells(faults & {Fault.FIRST_PAGE_ONLY}),
            _SEND_TEXTS,
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class FileOfContacts(Family):
    """Write the names of contacts of a relationship born before a date into a new file."""

    name = "file_of_contacts"
    variety = "hard"
    apps = ("phone", "file_system")
    difficulty = 3
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        "Save the names of all my {relation}s in my phone contacts who were born before {date} to the new file "
        '"~/documents/{stem}.txt" in my file system, one per line, in alphabetical order.',
        'Make a file "~/documents/{stem}.txt" in my file system with the name of every one of my {relation}s born '
        "before {date}, as in my phone contacts, each on its own line and sorted alphabetically.",
        'Create the new file "~/documents/{stem}.txt" in my file system. It lists the names of the {relation}s in my '
        "phone contacts whose date of birth is before {date}, one per line, sorted alphabetically.",
        'I need a new file "~/documents/{stem}.txt" in my file system that has one line for each of my {relation}s '
        "born earlier than {date}: the name as in my phone contacts, in alphabetical order.",
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(path=TITLE, relation=RELATION, date=DATE),
            *people_cells(faults),
            *_born_cells(faults),
            _WRITE_NAMES,
            _CREATE_FILE,
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


def _born_cells(faults: Faults) -> list[str]:
    """Of ``people`` keep those born before the date."""
    sign = ">" if Fault.WRONG_FILTER in faults else "<"
    return [
        cell("Select by birthday.", f'people = [c for c in people if c["birthday"] {sign} date]', "print(len(people))")
    ]


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


class StarRecentThreads(Family):
    """Star the threads received since a date from contacts of a relationship."""

    name = "star_recent_threads"
    variety = "hard"
    apps = ("phone", "gmail")
    difficulty = 3
    fatal = FATAL
    wordings = (
        "Star all email threads in my Gmail inbox that I received on or after {date} from my {relation}s, as saved in "
        "my phone contacts.",
        "My {relation}s are in my phone contacts. In my Gmail inbox, star every thread received from one of them since "
        "{date}, that day included.",
        "Look up my {relation}s in my phone contacts and star each thread in my Gmail inbox that I received from them "
        "on {date} or later.",
        "In my Gmail inbox, please star the threads received from my {relation}s (see my phone contacts) on or after "
        "{date}.",
    )

    def steps(self, faults: Faults) -> list[str]:
        box = "outbox" if Fault.WRONG_SOURCE in faults else "inbox"
        return [
            parameters_cell(relation=RELATION, date=DATE),
            *people_cells(faults),
            *fetch_cells(f"{box} threads", f"gmail.show_{box}_threads", faults & {Fault.FIRST_PAGE_ONLY}),
            cell(
                "Select the threads.",
                _COLLECT_EMAILS,
                f'threads = [t for t in rows if t["created_at"] {_not_before(faults)} date]',
                'threads = [t for t in threads if any(p["email"] in emails for p in t["participants"])]',
                "print(len(threads))",
            ),
            cell(
                "Star the threads.",
                "for t in threads:",
                '    thread_id = t["email_thread_id"]',
                "    apis.gmail.mark_thread_starred(email_thread_id=thread_id, access_token=gmail_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class TextNoteBorn(Family):
    """Text a note's content to contacts of a relationship born before a date."""

    name = "text_note_born"
    variety = "hard"
    apps = ("simple_note", "phone")
    difficulty = 3
    splits = ("test_challenge",)
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        'Send the content of my Simple Note note "{title}" as a text message to each of my {relation}s who was born '
        "before {date}.",
        "Each of my {relation}s born earlier than {date} should get a text message with the exact content of my Simple "
        'Note note "{title}".',
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(title=TITLE, relation=RELATION, date=DATE),
            *fetch_cells("notes", "simple_note.search_notes", faults),
            cell(
                "Read the note.",
                'note_id = [n["note_id"] for n in rows if n["title"] == title][0]',
                'message = apis.simple_note.show_note(note_id=note_id, access_token=simple_note_token)["content"]',
            ),
            *people_cells(faults & {Fault.FIRST_PAGE_ONLY}),
            *_born_cells(faults),
            _SEND_TEXTS,
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        note = rng.choice(notes_of(world, person)[PAGE_LIMIT:])
        if (found := _born(world, person, rng)) is None:
            return None
        params, people = found
        return Draft(
            params | {"title": note["title"]},
            changes=text_change(person, people, note["content"]),
            side_effects=TEXTED,
        )


FAMILIES = (
    DenyRelationRequests,
    TextSenders,
    NoteOfSenders,
    LikeRelationPayments,
    SumRelationPayments,
    NoteOfLongSongs,
    TextLongestSong,
    FileOfContacts,
    StarRecentThreads,
    FileOfSenders,
    TextNoteBorn,
)

"""Generates the sandbox's people and their data as plain rows, from the seed and without AppWorld.

Task drafts compute their ground truth from these rows, never by calling an API, so a wrong API idiom in a reference
solution cannot leak into its own evaluation. ``store`` turns the rows into AppWorld databases. Row ids are 1-based
insertion order, which is also what SQLite assigns. A person has the same user id in every app. Columns with AppWorld's
own default are left out.

AppWorld's list APIs that do not sort return rows in the order SQLite finds them: by id, or by a unique key that starts
with the user. Tables with such a key are filled in its order, so that id order is API order everywhere and "the first
page" of a table means the same here and in the API.
"""

from __future__ import annotations

import itertools
import random
import string
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

WORDS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))
"""Lists from which names and texts are drawn."""
NOW = datetime(2023, 5, 18, 12, 0, 0)
"""The frozen date and time of every sandbox task."""

APPS = ("amazon", "file_system", "gmail", "phone", "simple_note", "splitwise", "spotify", "todoist", "venmo")
RELATIONS = ("friend", "coworker", "sibling", "roommate")
PAGE_LIMIT = 5
"""AppWorld's default number of results a page."""
MIN_USERS, MAX_USERS = 20, len(WORDS["first_names"])

Row = dict[str, Any]


@dataclass(frozen=True)
class Person:
    """A main user: someone who can be a task's supervisor, and a contact of others."""

    id: int
    first_name: str
    last_name: str
    email: str
    phone_number: str
    birthday: str
    sex: str
    passwords: dict[str, str]

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first_name} {self.last_name}"

    @property
    def card(self) -> dict[str, str]:
        """Name, email address and phone number, under AppWorld's names."""
        return {field: getattr(self, field) for field in ("first_name", "last_name", "email", "phone_number")}


@dataclass
class World:
    """Everyone and everything: ``tables["spotify.Song"][k]`` is the row with id k + 1."""

    people: list[Person] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    _found: dict[tuple[str, str], dict[Any, list[Row]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The rows of each value, by (table, field), because task drafts look up rows thousands of times."""

    def add(self, table: str, **fields: Any) -> int:
        """Append a row; returns its id."""
        rows = self.tables[table]
        rows.append({"id": len(rows) + 1, **fields})
        return len(rows)

    def get(self, table: str, row_id: int) -> Row:
        """The row of that id."""
        return self.tables[table][row_id - 1]

    def where(self, table: str, **equal: Any) -> list[Row]:
        """Rows of a complete table whose fields equal the given values, in id order. The first field never changes."""
        (key, value), *others = equal.items()
        if (found := self._found.get((table, key))) is None:
            found = self._found[table, key] = defaultdict(list)
            for row in self.tables[table]:
                found[row[key]].append(row)
        return [row for row in found.get(value, ()) if all(row[name] == other for name, other in others)]

    def person(self, person_id: int) -> Person:
        """The person of that id."""
        return self.people[person_id - 1]


def populate(seed: int, users: int) -> World:
    """Make a world with ``users`` main users. Equal arguments give equal worlds, on any machine.

    Raises: ValueError if ``users`` is outside [MIN_USERS, MAX_USERS].
    """
    if not MIN_USERS <= users <= MAX_USERS:
        raise ValueError(f"users is {users}, expected {MIN_USERS} to {MAX_USERS}")
    world = World()
    # One random stream per app, so that rows added to one app do not change another's.
    streams = {part: random.Random(f"sandbox/{seed}/{part}") for part in ("people", *APPS)}
    _add_people(world, users, streams["people"])
    _add_phone(world, streams["phone"])
    _add_spotify(world, streams["spotify"])
    _add_venmo(world, streams["venmo"])
    _add_simple_note(world, streams["simple_note"])
    _add_todoist(world, streams["todoist"])
    _add_file_system(world, streams["file_system"])
    _add_gmail(world, streams["gmail"])
    _add_amazon(world, streams["amazon"])
    return world


def _moment(rng: random.Random, days: int = 500) -> datetime:
    """A random second within the given number of days before yesterday; ties are unlikely enough for sorting."""
    return NOW - timedelta(seconds=rng.randrange(86_400, days * 86_400))


def _moments(rng: random.Random, count: int, days: int = 500) -> list[datetime]:
    """Distinct moments in random order."""
    return [NOW - timedelta(seconds=s) for s in rng.sample(range(86_400, days * 86_400), count)]


def _products(left: Iterable[str], right: Iterable[str], rng: random.Random) -> list[str]:
    """All two-word names, shuffled."""
    names = [f"{a} {b}" for a, b in itertools.product(left, right)]
    rng.shuffle(names)
    return names


def _add_people(world: World, users: int, rng: random.Random) -> None:
    first_names = rng.sample(WORDS["first_names"], users)
    last_names = [rng.choice(WORDS["last_names"]) for _ in range(users)]
    phone_numbers = rng.sample(range(2_000_000_000, 9_999_999_999), users)
    alphabet = string.ascii_letters + string.digits
    for index, (first_name, last_name) in enumerate(zip(first_names, last_names, strict=True)):
        born = datetime(1950, 1, 1) + timedelta(days=rng.randrange(50 * 365))
        person = Person(
            id=index + 1,
            first_name=first_name,
            last_name=last_name,
            email=f"{first_name}.{last_name}@gmail.com".lower(),
            phone_number=str(phone_numbers[index]),
            birthday=born.date().isoformat(),
            sex=rng.choice(["male", "female"]),
            passwords={app: "".join(rng.choices(alphabet, k=8)) for app in APPS},
        )
        world.people.append(person)
        world.add("admin.MainUser", **person.card, birthday=person.birthday, sex=person.sex)
        for app in APPS:
            joined = NOW - timedelta(seconds=rng.randrange(600 * 86_400, 900 * 86_400))
            account: Row = {
                "first_name": person.first_name,
                "last_name": person.last_name,
                "password": person.passwords[app],
                "created_at": joined,
                "last_logged_in": joined,
            }
            if app == "phone":
                account["phone_number"] = person.phone_number
            else:
                account["email"] = person.email
            if app not in ("phone", "gmail"):
                account["verified"] = True
            if app == "venmo":
                account["venmo_balance"] = 5000.0
            world.add(f"{app}.User", **account)


def _add_phone(world: World, rng: random.Random) -> None:
    """Contacts with one relationship each, mutual, about 16 a person; alarms."""
    pairs: dict[int, list[tuple[Person, str]]] = defaultdict(list)
    for left, right in itertools.combinations(world.people, 2):
        if rng.random() < 0.6:
            relation = rng.choices(RELATIONS, weights=(5, 5, 3, 3))[0]
            pairs[left.id].append((right, relation))
            pairs[right.id].append((left, relation))
    for person in world.people:
        contacts = pairs[person.id]
        rng.shuffle(contacts)
        for (other, relation), moment in zip(contacts, _moments(rng, len(contacts)), strict=True):
            world.add(
                "phone.Contact",
                user_id=person.id,
                **other.card,
                relationships=[relation],
                birthday=other.birthday,
                created_at=moment,
            )
        times = sorted(rng.sample(range(5 * 12, 22 * 12), rng.randint(9, 13)))
        for slot, moment in zip(times, _moments(rng, len(times)), strict=True):
            world.add(
                "phone.Alarm",
                user_id=person.id,
                time=f"{slot // 12:02d}:{slot % 12 * 5:02d}",
                repeat_days=sorted(rng.sample(WORDS["days"], rng.randint(1, 3)), key=WORDS["days"].index),
                label=rng.choice(WORDS["alarm_labels"]),
                enabled=rng.random() < 0.7,
                snooze_minutes=rng.choice([0, 5, 10]),
                vibration=rng.random() < 0.5,
                created_at=moment,
            )


def _add_spotify(world: World, rng: random.Random) -> None:
    """Artists, albums and songs; playlists, libraries, likes and followings of every user.

    Songs that a user likes are neither in the user's playlists nor library, so that the data sources of tasks differ.
    """
    for name in _products(WORDS["artist_first"], WORDS["artist_last"], rng)[:60]:
        world.add("spotify.Artist", name=name, genre=rng.choice(WORDS["genres"]), created_at=_moment(rng, 2000))
    titles = _products(WORDS["adjectives"], WORDS["nouns"], rng)
    for title in titles[:40]:
        world.add(
            "spotify.Album",
            title=title,
            artist_ids=[rng.randint(1, 60)],
            release_date=_moment(rng, 3000),
            genre=rng.choice(WORDS["genres"]),
            rating=rng.randint(20, 50) / 10,
        )
    durations = rng.sample(range(121, 480), 280)
    for title, duration in zip(titles[40:320], durations, strict=True):
        album_id = rng.randint(1, 40) if rng.random() < 0.7 else None
        artist_ids = world.get("spotify.Album", album_id)["artist_ids"] if album_id else [rng.randint(1, 60)]
        world.add(
            "spotify.Song",
            title=title,
            artist_ids=list(artist_ids),
            album_id=album_id,
            duration=duration,
            release_date=_moment(rng, 3000),
            genre=rng.choice(WORDS["genres"]),
            play_count=rng.randrange(1000),
            rating=rng.randint(10, 50) / 10,
            like_count=0,
        )
    songs = [song["id"] for song in world.tables["spotify.Song"]]
    for person in world.people:
        _add_listener(world, person, songs, rng)


def _add_listener(world: World, person: Person, songs: list[int], rng: random.Random) -> None:
    """A user's playlists, library, likes and followings."""
    shuffled = rng.sample(songs, len(songs))
    listed, liked_pool = shuffled[:200], shuffled[200:]
    for title in rng.sample(WORDS["playlist_titles"], rng.randint(8, 11)):
        playlist_id = world.add(
            "spotify.Playlist",
            title=title,
            user_id=person.id,
            created_at=_moment(rng),
            is_public=rng.random() < 0.5,
            rating=0.0,
        )
        for song_id in rng.sample(listed, rng.randint(8, 12)):
            world.add("spotify.PlaylistSong", playlist_id=playlist_id, song_id=song_id, added_at=_moment(rng))
    library = sorted(rng.sample(listed, rng.randint(13, 22)))
    for song_id, moment in zip(library, _moments(rng, len(library)), strict=True):
        world.add("spotify.UserLibrarySong", user_id=person.id, song_id=song_id, created_at=moment)
    liked = sorted(rng.sample(liked_pool, rng.randint(11, 17)))
    for song_id, moment in zip(liked, _moments(rng, len(liked)), strict=True):
        world.add("spotify.SongLike", user_id=person.id, song_id=song_id, liked_at=moment)
        world.get("spotify.Song", song_id)["like_count"] += 1
    albums = sorted(rng.sample(range(1, 41), rng.randint(7, 12)))
    for album_id, moment in zip(albums, _moments(rng, len(albums)), strict=True):
        world.add("spotify.UserLibraryAlbum", user_id=person.id, album_id=album_id, created_at=moment)
    artists = sorted(rng.sample(range(1, 61), rng.randint(12, 16)))
    for artist_id, moment in zip(artists, _moments(rng, len(artists)), strict=True):
        world.add("spotify.UserArtistFollowing", user_id=person.id, artist_id=artist_id, created_at=moment)


def _add_venmo(world: World, rng: random.Random) -> None:
    """Friendships, transactions and payment requests among all users."""
    ids = [person.id for person in world.people]
    for person in world.people:
        others = [other for other in ids if other != person.id]
        for friend_id in rng.sample(others, rng.randint(8, 11)):
            world.add("venmo.Friendship", user_id=person.id, friend_id=friend_id, created_at=_moment(rng))
        for _ in range(rng.randint(10, 14)):
            moment = _moment(rng)
            world.add(
                "venmo.Transaction",
                sender_id=person.id,
                receiver_id=rng.choice(others),
                amount=float(rng.randint(5, 150)),
                description=rng.choice(WORDS["payment_reasons"]),
                created_at=moment,
                updated_at=moment,
                private=rng.random() < 0.3,
            )
        for _ in range(rng.randint(14, 18)):
            moment = _moment(rng, 300)
            status = rng.choices(["pending", "approved", "denied"], weights=(7, 2, 1))[0]
            world.add(
                "venmo.PaymentRequest",
                sender_id=rng.choice(others),
                receiver_id=person.id,
                amount=float(rng.randint(5, 150)),
                description=rng.choice(WORDS["payment_reasons"]),
                created_at=moment,
                updated_at=moment,
                approved_at=moment + timedelta(hours=5) if status == "approved" else None,
                denied_at=moment + timedelta(hours=5) if status == "denied" else None,
            )


def _add_simple_note(world: World, rng: random.Random) -> None:
    """Notes with tags and dates."""
    for person in world.people:
        titles = sorted(_products(WORDS["note_topics"], WORDS["note_kinds"], rng)[: rng.randint(13, 17)])
        for title, moment in zip(titles, _moments(rng, len(titles)), strict=True):
            world.add(
                "simple_note.Note",
                user_id=person.id,
                title=title,
                content=f"{rng.choice(WORDS['sentences'])}\n{rng.choice(WORDS['sentences'])}",
                tags=sorted(rng.sample(WORDS["note_tags"], rng.randint(1, 2))),
                created_at=moment,
                updated_at=moment + timedelta(hours=rng.randrange(1, 20)),
                pinned=rng.random() < 0.15,
            )


def _add_todoist(world: World, rng: random.Random) -> None:
    """Projects without other collaborators, with tasks that have due dates."""
    for person in world.people:
        for name in rng.sample(WORDS["project_names"], rng.randint(8, 10)):
            moment = _moment(rng)
            project_id = world.add(
                "todoist.Project",
                user_id=person.id,
                name=name,
                color=rng.choice(WORDS["colors"]),
                created_at=moment,
            )
            world.add(
                "todoist.ProjectCollaboratorLink",
                project_id=project_id,
                user_id=person.id,
                is_favorite=rng.random() < 0.3,
                created_at=moment,
            )
            for order, title in enumerate(
                _products(WORDS["task_verbs"], WORDS["task_objects"], rng)[: rng.randint(5, 8)]
            ):
                world.add(
                    "todoist.Task",
                    project_id=project_id,
                    user_id=person.id,
                    title=title,
                    description="",
                    due_date=NOW.replace(hour=0) + timedelta(days=rng.randrange(-120, 60)),
                    priority=rng.choice(["high", "medium", "low"]),
                    is_completed=rng.random() < 0.2,
                    order_index=order,
                    created_at=moment,
                )


def _add_file_system(world: World, rng: random.Random) -> None:
    """A home folder with downloads and documents, files of several extensions in both."""
    for person in world.people:
        home = f"/home/{person.first_name.lower()}/"
        made = NOW - timedelta(days=rng.randrange(520, 590))
        for path in ("/", "/home/", home, *(f"{home}{folder}/" for folder in WORDS["folders"])):
            world.add("file_system.Directory", path=path, user_id=person.id, created_at=made, updated_at=made)
        for folder in WORDS["folders"]:
            for stem in sorted(rng.sample(WORDS["file_stems"], rng.randint(8, 12))):
                moment = _moment(rng)
                world.add(
                    "file_system.File",
                    path=f"{home}{folder}/{stem}.{rng.choice(WORDS['extensions'])}",
                    user_id=person.id,
                    content=rng.choice(WORDS["sentences"]),
                    compressed_data=[],
                    created_at=moment,
                    updated_at=moment,
                )


def _add_gmail(world: World, rng: random.Random) -> None:
    """Threads of one email each, from contacts and others."""
    for person in world.people:
        emails = {row["email"] for row in world.where("phone.Contact", user_id=person.id)}
        known = [other for other in world.people if other.email in emails]
        others = [other for other in world.people if other.id != person.id]
        for _ in range(rng.randint(13, 17)):
            sender = rng.choice(known if rng.random() < 0.7 else others)
            moment = _moment(rng, 200)
            email_id = world.add(
                "gmail.Email",
                sender_id=sender.id,
                recipient_ids=[person.id],
                subject=rng.choice(WORDS["subjects"]),
                body=rng.choice(WORDS["messages"]),
                created_at=moment,
            )
            thread_id = world.add("gmail.GlobalEmailThread", email_ids=[email_id], created_at=moment, updated_at=moment)
            for owner in (sender, person):
                world.add(
                    "gmail.UserEmailThread",
                    global_email_thread_id=thread_id,
                    user_id=owner.id,
                    email_ids=[email_id],
                    incoming=owner is person,
                    outgoing=owner is sender,
                    read=owner is sender or rng.random() < 0.5,
                    created_at=moment,
                    updated_at=moment,
                )


def _add_amazon(world: World, rng: random.Random) -> None:
    """Products, and wish lists with one to three of each product; carts are empty."""
    for name in WORDS["sellers"]:
        world.add("amazon.Seller", name=name, rating=rng.randint(30, 50) / 10)
    for name in _products(WORDS["product_styles"], WORDS["product_types"], rng):
        seller = rng.choice(world.tables["amazon.Seller"])
        world.add(
            "amazon.Product",
            product_type=name.split()[1].lower(),
            name=name,
            description=f"{name}, made to last.",
            seller_id=seller["id"],
            price=rng.randint(500, 15_000) / 100,
            delivery_days=rng.randint(1, 7),
            inventory_quantity=rng.randint(20, 60),
            weight=rng.randint(1, 50) / 10,
            length=rng.randint(5, 60) / 1.0,
            width=rng.randint(5, 60) / 1.0,
            height=rng.randint(5, 60) / 1.0,
            rating=rng.randint(20, 50) / 10,
            seller_rating=seller["rating"],
        )
    products = range(1, len(world.tables["amazon.Product"]) + 1)
    for person in world.people:
        for product_id in sorted(rng.sample(products, rng.randint(8, 12))):
            world.add("amazon.WishListEntry", user_id=person.id, product_id=product_id, quantity=rng.randint(1, 3))

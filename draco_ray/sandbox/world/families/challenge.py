"""Families of test_challenge only: apps that no training task uses, and compositions of known apps that are new."""

from __future__ import annotations

import random
from datetime import timedelta

from draco_ray.sandbox.world import words
from draco_ray.sandbox.world.families.phone import (
    CLOSE_RELATIONS,
    contacts_of,
    related,
    select_people_cell,
    text_change,
)
from draco_ray.sandbox.world.families.simple_note import notes_of
from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, RELATIONS, Person, Row, World
from draco_ray.sandbox.world.scripts import (
    DATE,
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

CHALLENGE = ("test_challenge",)


class CompleteDueTasks(Family):
    """Complete a Todoist project's tasks due before a date."""

    name = "complete_due_tasks"
    apps = ("todoist",)
    difficulty = 2
    splits = CHALLENGE
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        'Mark all tasks in my "{project}" project on Todoist that were due before {date} as completed.',
        'In Todoist, complete every task of my project "{project}" whose due date is before {date}.',
    )

    def steps(self, faults: Faults) -> list[str]:
        sign = ">" if Fault.WRONG_FILTER in faults else "<"
        return [
            parameters_cell(title=TITLE, date=DATE),
            *fetch_cells("projects", "todoist.show_projects", faults),
            cell("Find the project.", 'project_id = [p["project_id"] for p in rows if p["name"] == title][0]'),
            cell(
                "Select the tasks.",
                "tasks = apis.todoist.show_tasks(project_id=project_id, access_token=todoist_token)",
                f'tasks = [t for t in tasks["no_section_tasks"] if t["due_date"] {sign} date]',
                "print(len(tasks))",
            ),
            cell(
                "Complete the tasks.",
                "for t in tasks:",
                '    apis.todoist.update_task(task_id=t["task_id"], is_completed=True, access_token=todoist_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class DeleteFiles(Family):
    """Delete a folder's files of one extension."""

    name = "delete_files"
    apps = ("file_system",)
    difficulty = 1
    splits = CHALLENGE
    fatal = FATAL - {Fault.FIRST_PAGE_ONLY}
    wordings = (
        'Delete all files with the extension ".{extension}" from the folder "~/downloads/" in my file system.',
        'In my file system, remove every ".{extension}" file that is in the folder "~/downloads/".',
    )

    def steps(self, faults: Faults) -> list[str]:
        folder = "~/documents/" if Fault.WRONG_SOURCE in faults else "~/downloads/"
        sign = "not p" if Fault.WRONG_FILTER in faults else "p"
        return [
            parameters_cell(extension=TITLE),
            *fetch_cells(
                "files", "file_system.show_directory", faults, extra=f'directory_path="{folder}", ', paged=False
            ),
            cell("Select the files.", f"paths = [p for p in rows if {sign}.endswith(extension)]", "print(len(paths))"),
            cell(
                "Delete the files.",
                "for path in paths:",
                "    apis.file_system.delete_file(file_path=path, access_token=file_system_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        extension = rng.choice(words.EXTENSIONS)
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


class StarRelationThreads(Family):
    """Star the email threads received from contacts of a relationship."""

    name = "star_relation_threads"
    apps = ("phone", "gmail")
    difficulty = 3
    splits = CHALLENGE
    fatal = FATAL
    wordings = (
        "Star all email threads in my Gmail inbox that are from my {relation}s, as saved in my phone contacts.",
        "My {relation}s are in my phone contacts. In my Gmail inbox, star every thread that came from one of them.",
    )

    def steps(self, faults: Faults) -> list[str]:
        box = "outbox" if Fault.WRONG_SOURCE in faults else "inbox"
        return [
            parameters_cell(relation=RELATION),
            *fetch_cells("contacts", "phone.search_contacts", faults),
            select_people_cell(faults),
            *fetch_cells(f"{box} threads", f"gmail.show_{box}_threads", faults & {Fault.FIRST_PAGE_ONLY}),
            cell(
                "Select the threads.",
                'emails = [c["email"] for c in people]',
                'threads = [t for t in rows if any(p["email"] in emails for p in t["participants"])]',
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
        contacts = contacts_of(world, person)
        inbox = world.where("gmail.UserEmailThread", user_id=person.id, incoming=True)
        inbox.sort(key=lambda row: row["updated_at"], reverse=True)

        def by(rows: list[Row], people: list[Row]) -> list[int]:
            emails = {row["email"] for row in related(people, relation)}
            senders = [world.get("gmail.Email", row["email_ids"][0])["sender_id"] for row in rows]
            return [
                row["id"] for row, sender in zip(rows, senders, strict=True) if world.person(sender).email in emails
            ]

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


class MoveWishesToCart(Family):
    """Move the cheap products of the wish list to the cart."""

    name = "move_wishes_to_cart"
    apps = ("amazon",)
    difficulty = 2
    splits = CHALLENGE
    fatal = FATAL - {Fault.FIRST_PAGE_ONLY}
    wordings = (
        "Move every product of my Amazon wish list that costs less than ${limit} to my cart, in its full quantity.",
        "On Amazon, take all products priced below ${limit} from my wish list and move them, all units, to my cart.",
    )

    def steps(self, faults: Faults) -> list[str]:
        if Fault.WRONG_SOURCE in faults:
            fetch = fetch_cells("products", "amazon.search_products", faults, paged=False)
        else:
            fetch = fetch_cells("wish list", "amazon.show_wish_list", faults, paged=False)
        sign = ">" if Fault.WRONG_FILTER in faults else "<"
        quantity = "1" if Fault.WRONG_SOURCE in faults else 'e["quantity"]'
        return [
            parameters_cell(limit=NUMBER),
            *fetch,
            cell(
                "Select the products.", f'entries = [e for e in rows if e["price"] {sign} limit]', "print(len(entries))"
            ),
            cell(
                "Move the products.",
                "for e in entries:",
                "    apis.amazon.move_product_from_wish_list_to_cart(",
                f'        product_id=e["product_id"], quantity={quantity}, access_token=amazon_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class NoteOfPlaylists(Family):
    """Write the playlists' titles into a new note."""

    name = "note_of_playlists"
    apps = ("spotify", "simple_note")
    difficulty = 3
    splits = CHALLENGE
    fatal = FATAL
    wordings = (
        'Create a note titled "{title}" in Simple Note that lists the titles of all my Spotify playlists, '
        "one per line, in alphabetical order.",
        'Write the titles of all playlists in my Spotify playlist library into a new Simple Note note "{title}", '
        "each on its own line and sorted alphabetically.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "playlist library", "spotify.show_playlist_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "album library", "spotify.show_album_library"
        some = ' if r["rating"] > 4' if Fault.WRONG_FILTER in faults else ""
        return [
            parameters_cell(title=TITLE),
            *fetch_cells(what, api, faults),
            cell(
                "Write the list.",
                f'content = "\\n".join(sorted(r["title"] for r in rows{some}))',
                "print(len(content))",
            ),
            cell(
                "Create the note.",
                "apis.simple_note.create_note(title=title, content=content, access_token=simple_note_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        title = rng.choice(words.NEW_TITLES)
        content = "\n".join(sorted(row["title"] for row in world.where("spotify.Playlist", user_id=person.id)))
        change = Change("simple_note.Note", ("user_id", "title", "content"), added=((person.id, title, content),))
        return Draft({"title": title}, changes=(change,))


class TextNote(Family):
    """Text a note's content to all contacts of a relationship."""

    name = "text_note"
    apps = ("simple_note", "phone")
    difficulty = 3
    splits = CHALLENGE
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        'Send the content of my Simple Note note "{title}" as a text message to each of my {relation}s.',
        'Each of my {relation}s should get a text message with the exact content of my Simple Note note "{title}".',
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(title=TITLE, relation=RELATION),
            *fetch_cells("notes", "simple_note.search_notes", faults),
            cell(
                "Read the note.",
                'note_id = [n["note_id"] for n in rows if n["title"] == title][0]',
                'message = apis.simple_note.show_note(note_id=note_id, access_token=simple_note_token)["content"]',
            ),
            *fetch_cells("contacts", "phone.search_contacts", faults & {Fault.FIRST_PAGE_ONLY}),
            select_people_cell(faults),
            cell(
                "Send the text messages.",
                "for c in people:",
                '    number = c["phone_number"]',
                "    apis.phone.send_text_message(phone_number=number, message=message, access_token=phone_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class FileOfSongs(Family):
    """Write the library's song titles into a file."""

    name = "file_of_songs"
    apps = ("spotify", "file_system")
    difficulty = 3
    splits = CHALLENGE
    fatal = FATAL - {Fault.WRONG_FILTER}
    wordings = (
        'Save the titles of all songs in my Spotify song library to the new file "~/documents/{stem}.txt" in my file '
        "system, one title per line, in alphabetical order.",
        'Make a file "~/documents/{stem}.txt" in my file system with the title of every song in my Spotify song '
        "library, each on its own line and sorted alphabetically.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "song library", "spotify.show_song_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "liked songs", "spotify.show_liked_songs"
        return [
            parameters_cell(path=TITLE),
            *fetch_cells(what, api, faults),
            cell("Write the list.", 'content = "\\n".join(sorted(r["title"] for r in rows))', "print(len(content))"),
            cell(
                "Create the file.",
                "apis.file_system.create_file(file_path=path, content=content, access_token=file_system_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        stem = f"songs_{rng.randint(1, 99)}"
        library = world.where("spotify.UserLibrarySong", user_id=person.id)
        content = "\n".join(sorted(world.get("spotify.Song", row["song_id"])["title"] for row in library))
        row = (person.id, f"~/documents/{stem}.txt", content)
        return Draft(
            {"stem": stem},
            changes=(Change("file_system.File", ("user_id", "tilde_path", "content"), added=(row,)),),
            side_effects=(SideEffect("file_system.Directory", touched=("updated_at",)),),
        )


FAMILIES = (
    CompleteDueTasks,
    DeleteFiles,
    StarRelationThreads,
    MoveWishesToCart,
    NoteOfPlaylists,
    TextNote,
    FileOfSongs,
)

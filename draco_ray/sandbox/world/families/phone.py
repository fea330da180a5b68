"""Families about the supervisor's phone: contacts, text messages, alarms."""

from __future__ import annotations

import random
from datetime import datetime

from draco_ray.sandbox.world import words
from draco_ray.sandbox.world.population import PAGE_LIMIT, RELATIONS, Person, Row, World
from draco_ray.sandbox.world.scripts import (
    DATE,
    FATAL,
    RELATION,
    TIME,
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

CLOSE_RELATIONS = ("coworker", "sibling", "roommate")
"""Relations that no other app has a notion of (Venmo has friends of its own)."""


def contacts_of(world: World, person: Person) -> list[Row]:
    """A person's contacts in the order of the API: latest first."""
    return sorted(world.where("phone.Contact", user_id=person.id), key=lambda row: row["created_at"], reverse=True)


def select_people_cell(faults: Faults) -> str:
    """Keep the contacts of the task's relationship, as ``people``."""
    sign = "not in" if Fault.WRONG_FILTER in faults else "in"
    return cell(
        "Select the contacts by relationship.",
        f'people = [c for c in rows if relation {sign} c["relationships"]]',
        "print(len(people))",
    )


def related(rows: list[Row], relation: str) -> list[Row]:
    """The contacts of that relationship."""
    return [row for row in rows if relation in row["relationships"]]


def text_change(person: Person, receivers: list[Row], message: str) -> tuple[Change, ...]:
    """One text message to each receiver."""
    fields = ("sender_id", "receiver.phone_number", "message")
    rows = tuple((person.id, receiver["phone_number"], message) for receiver in receivers)
    return (Change("phone.GlobalTextMessage", fields, added=rows),)


class TextRelation(Family):
    """Text the same message to all contacts of a relationship."""

    name = "text_relation"
    apps = ("phone",)
    difficulty = 2
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        'Send the text message "{message}" to each of my {relation}s.',
        'Text all my {relation}s on the phone, saying exactly "{message}"',
        'I want all of my {relation}s to get this text message: "{message}"',
        'Please text "{message}" to every one of my {relation}s.',
    )

    def steps(self, faults: Faults) -> list[str]:
        return [
            parameters_cell(message=TITLE, relation=RELATION),
            *fetch_cells("contacts", "phone.search_contacts", faults),
            select_people_cell(faults),
            cell(
                "Send the text messages.",
                "for c in people:",
                '    number = c["phone_number"]',
                "    apis.phone.send_text_message(phone_number=number, message=message, access_token=phone_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        relation, message = rng.choice(RELATIONS), rng.choice(words.MESSAGES)
        contacts = contacts_of(world, person)
        receivers = related(contacts, relation)
        if len(related(contacts[:PAGE_LIMIT], relation)) == len(receivers):
            return None
        return Draft(
            params={"relation": relation, "message": message},
            changes=text_change(person, receivers, message),
            side_effects=(SideEffect("phone.UserTextMessage", added=True),),
        )


class DisableLateAlarms(Family):
    """Turn off the alarms after a time of day."""

    name = "disable_late_alarms"
    apps = ("phone",)
    difficulty = 1
    fatal = FATAL - {Fault.WRONG_SOURCE}
    wordings = (
        "Turn off all my phone alarms that are set for later than {time}.",
        "Disable every alarm on my phone that rings after {time}.",
        "No alarm on my phone should ring later than {time}. Disable those that do.",
        "Please switch off all alarms of my phone that are set after {time}.",
    )

    def steps(self, faults: Faults) -> list[str]:
        sign = "<" if Fault.WRONG_FILTER in faults else ">"
        return [
            parameters_cell(time=TIME),
            *fetch_cells("alarms", "phone.show_alarms", faults),
            cell("Select the alarms.", f'alarms = [a for a in rows if a["time"] {sign} time]', "print(len(alarms))"),
            cell(
                "Turn off the alarms.",
                "for a in alarms:",
                '    apis.phone.update_alarm(alarm_id=a["alarm_id"], enabled=False, access_token=phone_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class CountContactsBorn(Family):
    """Count the contacts born before a date."""

    name = "count_contacts_born"
    apps = ("phone",)
    difficulty = 1
    fatal = FATAL
    answers = True
    wordings = (
        "How many of my phone contacts were born before {date}?",
        "Count the people in my phone contacts whose date of birth is before {date}.",
        "Tell me how many contacts in my phone were born earlier than {date}.",
        "What is the number of my phone contacts born before {date}?",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, extra = "contacts", ""
        if Fault.WRONG_SOURCE in faults:
            what, extra = "friends", 'relationship="friend", '
        sign = ">" if Fault.WRONG_FILTER in faults else "<"
        return [
            parameters_cell(date=DATE),
            *fetch_cells(what, "phone.search_contacts", faults, extra),
            cell(
                "Count the contacts.", f'answer = len([c for c in rows if c["birthday"] {sign} date])', "print(answer)"
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        date = datetime(rng.randint(1960, 1990), rng.randint(1, 12), 1).date().isoformat()
        contacts = contacts_of(world, person)
        friends = related(contacts, "friend")

        def born(rows: list[Row]) -> int:
            return sum(row["birthday"] < date for row in rows)

        answer = born(contacts)
        wrong = {born(contacts[:PAGE_LIMIT]), born(friends), born(friends[:PAGE_LIMIT]), len(contacts) - answer}
        return None if answer in wrong else Draft(params={"date": date}, answer=answer)


FAMILIES = (TextRelation, DisableLateAlarms, CountContactsBorn)

"""Families about the supervisor's money among friends."""

from __future__ import annotations

import random
from datetime import timedelta

from draco_ray.sandbox.world.families.phone import CLOSE_RELATIONS, contacts_of, related, select_people_cell
from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, Person, Row, World
from draco_ray.sandbox.world.scripts import (
    DATE,
    FATAL,
    NUMBER,
    RELATION,
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


def pending_requests(world: World, person: Person) -> list[Row]:
    """Payment requests a person has not answered, in the order of the API: latest first."""
    rows = world.where("venmo.PaymentRequest", receiver_id=person.id, approved_at=None, denied_at=None)
    return sorted(rows, key=lambda row: row["created_at"], reverse=True)


class SumReceived(Family):
    """Add up the money received since a date."""

    name = "sum_received"
    apps = ("venmo",)
    difficulty = 2
    fatal = FATAL
    answers = True
    wordings = (
        "How much money have I received on Venmo in total on or after {date}?",
        "Add up all the money sent to me on Venmo since {date}, that day included. How much is it?",
        "What is the total amount of the Venmo payments I received on {date} or later?",
        "Tell me the total of all Venmo transactions in which I received money on or after {date}.",
    )

    def steps(self, faults: Faults) -> list[str]:
        direction = "sent" if Fault.WRONG_SOURCE in faults else "received"
        sign = "<" if Fault.WRONG_FILTER in faults else ">="
        return [
            parameters_cell(date=DATE),
            *fetch_cells(f"{direction} payments", "venmo.show_transactions", faults, f'direction="{direction}", '),
            cell(
                "Add up the amounts.",
                f'answer = sum(r["amount"] for r in rows if r["created_at"] {sign} date)',
                "print(answer)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        since = NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))
        received = world.where("venmo.Transaction", receiver_id=person.id)
        sent = world.where("venmo.Transaction", sender_id=person.id)

        def total(rows: list[Row]) -> float:
            return sum(row["amount"] for row in rows if row["created_at"] >= since)

        answer = total(received)
        earlier = sum(row["amount"] for row in received) - answer
        wrong = {total(received[:PAGE_LIMIT]), total(sent), total(sent[:PAGE_LIMIT]), earlier, 0.0}
        return None if answer in wrong else Draft(params={"date": since.date().isoformat()}, answer=answer)


class DenyLargeRequests(Family):
    """Deny pending payment requests over an amount."""

    name = "deny_large_requests"
    apps = ("venmo",)
    difficulty = 2
    fatal = FATAL
    wordings = (
        "Deny all pending payment requests on Venmo that ask me for more than ${limit}.",
        "On Venmo, people still ask me for money. Deny every pending request of more than ${limit}.",
        "Please deny each pending Venmo payment request I have received that is above ${limit}.",
        "I will not pay more than ${limit} at once: deny all my pending received Venmo requests above that amount.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what = "sent" if Fault.WRONG_SOURCE in faults else "received"
        sign = "<" if Fault.WRONG_FILTER in faults else ">"
        return [
            parameters_cell(limit=NUMBER),
            *fetch_cells(f"{what} requests", f"venmo.show_{what}_payment_requests", faults, extra='status="pending", '),
            cell(
                "Select the requests.",
                f'requests = [r for r in rows if r["amount"] {sign} limit]',
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


class ApproveRelationRequests(Family):
    """Approve the pending payment requests of contacts of a relationship."""

    name = "approve_relation_requests"
    apps = ("phone", "venmo")
    difficulty = 3
    fatal = FATAL
    wordings = (
        "Approve all pending Venmo payment requests from my {relation}s, as saved in my phone contacts.",
        "My {relation}s are in my phone contacts. Approve every pending payment request they have sent me on Venmo.",
        "Accept each pending Venmo payment request that comes from one of my {relation}s (see my phone contacts).",
        "Look up my {relation}s in my phone contacts and approve all their pending requests to me on Venmo.",
    )

    def steps(self, faults: Faults) -> list[str]:
        if Fault.WRONG_SOURCE in faults:
            people = [
                *fetch_cells("Venmo friends", "venmo.search_friends", faults),
                cell("Collect the friends.", "people = rows", "print(len(people))"),
            ]
        else:
            people = [*fetch_cells("contacts", "phone.search_contacts", faults), select_people_cell(faults)]
        return [
            parameters_cell(relation=RELATION),
            *people,
            *fetch_cells(
                "received requests",
                "venmo.show_received_payment_requests",
                faults & {Fault.FIRST_PAGE_ONLY},
                extra='status="pending", ',
            ),
            cell(
                "Select the requests.",
                'emails = [c["email"] for c in people]',
                'requests = [r for r in rows if r["sender"]["email"] in emails]',
                "print(len(requests))",
            ),
            cell(
                "Approve the requests.",
                "for r in requests:",
                '    request_id = r["payment_request_id"]',
                "    apis.venmo.approve_payment_request(payment_request_id=request_id, access_token=venmo_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class LikeReceivedPayments(Family):
    """Like the payments received since a date."""

    name = "like_received_payments"
    apps = ("venmo",)
    difficulty = 2
    fatal = FATAL
    wordings = (
        "Like all the Venmo transactions in which I received money on or after {date}.",
        "On Venmo, like every payment that was sent to me since {date}, that day included.",
        "Please like each Venmo payment I received on {date} or later.",
        "Give a like to all Venmo payments that I have received on or after {date}.",
    )

    def steps(self, faults: Faults) -> list[str]:
        direction = "sent" if Fault.WRONG_SOURCE in faults else "received"
        sign = "<" if Fault.WRONG_FILTER in faults else ">="
        return [
            parameters_cell(date=DATE),
            *fetch_cells(f"{direction} payments", "venmo.show_transactions", faults, f'direction="{direction}", '),
            cell(
                "Select the payments.",
                f'payments = [r for r in rows if r["created_at"] {sign} date]',
                "print(len(payments))",
            ),
            cell(
                "Like the payments.",
                "for r in payments:",
                '    apis.venmo.like_transaction(transaction_id=r["transaction_id"], access_token=venmo_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


FAMILIES = (SumReceived, DenyLargeRequests, ApproveRelationRequests, LikeReceivedPayments)

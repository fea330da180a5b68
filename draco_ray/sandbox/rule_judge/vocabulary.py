"""Words: what tasks call AppWorld's lists and actions, and what the APIs' documentation calls them."""

# ruff: noqa: SIM905 (lists of plain words read best as plain words)

from __future__ import annotations

import re
from dataclasses import dataclass

MAKING = re.compile(r"^(?:send|create|add|post|record|reply|forward|write|place|review|download|copy|withdraw)_")
"""Names of APIs that make one thing more whenever they are called."""
SUPPORT_APPS = frozenset({"supervisor", "api_docs"})
"""Apps that tell about the task and the APIs; they are never what a task is about."""
READING = re.compile(r"^(?:show|search|get|login|logout|find|list|read)(?:_|$)|_exists$")
"""Names of APIs that change nothing."""
UNPAGED = frozenset(
    "show_directory show_cart show_wish_list show_payment_cards show_addresses show_tasks show_sub_tasks show_sections "
    "show_genres show_song_queue show_account_passwords show_contact_relationships show_category_sizes "
    "show_people_balance show_groups_balance show_return_deliverers show_prime_plans show_premium_plans".split()
)
"""List APIs that return everything at once."""
_LIST_NAMES = re.compile(
    r"^search_|^show_(?:\w+_)?(?:songs|albums|playlists|library|artists|recommendations|reviews|questions|answers|orders"
    r"|returns|threads|drafts|alarms|window|projects|comments|notifications|transactions|requests|feed|history|activity"
    r"|groups|expenses|payments|subscriptions)$"
)
PAGE_LIMIT = 5
"""AppWorld's default number of results on a page."""
MOST_ON_A_PAGE = 20


def is_paged(api: str) -> bool:
    """Whether an API returns its list page by page."""
    return api not in UNPAGED and _LIST_NAMES.search(api) is not None


def is_list(api: str) -> bool:
    """Whether an API returns a list of the user's things."""
    return is_paged(api) or api in UNPAGED


@dataclass(frozen=True, slots=True)
class ListWords:
    """How tasks name a list, and the APIs that read it."""

    name: str
    words: re.Pattern[str]
    apis: frozenset[str]
    app: str
    directed: bool = False
    """Whether the list has a received and a sent side."""


def _list(name: str, words: str, apis: str, app: str, directed: bool = False) -> ListWords:
    return ListWords(name, re.compile(words, re.IGNORECASE), frozenset(apis.split()), app, directed)


RELATION_WORDS = (
    "friend|coworker|colleague|sibling|brother|sister|roommate|parent|mother|father|husband|wife|spouse|partner"
)
"""Relationships by which people name their contacts."""

LISTS = (
    _list("the album library", r"album library|albums? in my (?:\w+ )?library", "show_album_library", "spotify"),
    _list(
        "the song library",
        r"song library|songs? (?:\w+ ){0,2}(?:in|of|from) my (?:\w+ )?library",
        "show_song_library",
        "spotify",
    ),
    _list(
        "the liked albums", r"liked albums|albums? (?:that )?I(?: have|'ve)? liked\b", "show_liked_albums", "spotify"
    ),
    _list("the liked songs", r"liked songs|songs? (?:that )?I(?: have|'ve)? liked\b", "show_liked_songs", "spotify"),
    _list(
        "the downloaded songs", r"downloaded songs|songs I(?: have|'ve)? downloaded", "show_downloaded_songs", "spotify"
    ),
    _list("the song queue", r"(?:song|music|player|play) queue", "show_song_queue", "spotify"),
    _list(
        "the followed artists",
        r"artists? (?:that |whom )?I (?:already )?follow\b|followed artists|(?:do not|don't) follow yet"
        r"|I already follow|I follow already",
        "show_following_artists",
        "spotify",
    ),
    _list("the playlists", r"playlists? library|playlists?", "show_playlist_library show_playlist", "spotify"),
    _list(
        "the payment requests",
        r"(?:payment |venmo |pending |received |sent )requests?|requests? (?:to|from) me",
        "show_received_payment_requests show_sent_payment_requests",
        "venmo",
        directed=True,
    ),
    _list(
        "the transactions",
        r"venmo (?:payments?|transactions?)|transactions?|payments? I|(?:received|sent) (?:any )?(?:money|payments?)"
        r"|money (?:have I received|sent|I received)|on venmo, \w+ every payment",
        "show_transactions",
        "venmo",
        directed=True,
    ),
    _list("the Venmo friends", r"venmo friends|friends on venmo", "search_friends", "venmo"),
    _list("the social feed", r"social feed", "show_social_feed", "venmo"),
    _list("the alarms", r"alarms?", "show_alarms", "phone"),
    _list("the phone's contacts", rf"contacts?|my (?:{RELATION_WORDS})s?\b", "search_contacts", "phone"),
    _list("the inbox", r"inbox|emails? (?:I )?(?:have )?received", "show_inbox_threads", "gmail"),
    _list("the outbox", r"outbox|emails? (?:that )?I (?:have )?sent|sent emails?", "show_outbox_threads", "gmail"),
    _list("the drafts", r"\bdrafts?\b", "show_drafts", "gmail"),
    _list("the wish list", r"wish ?list", "show_wish_list", "amazon"),
    _list("the orders", r"(?:my|past|previous|amazon) orders?", "show_orders", "amazon"),
    _list("the cart", r"(?:in|from|of) my (?:amazon |shopping )?cart", "show_cart", "amazon"),
    _list("the Todoist projects", r"\bprojects?\b", "show_projects", "todoist"),
    _list("the folder", r"(?:folder|directory) \"|(?:folder|directory) ~", "show_directory", "file_system"),
    _list("the notes", r"\bnotes?\b", "search_notes show_notes", "simple_note"),
)
"""In order of precedence: what one entry has claimed of a task's text, later ones do not see."""

APP_WORDS = {
    "spotify": r"spotify|playlist|\bsongs?\b|\bartists?\b|\balbums?\b",
    "venmo": r"venmo",
    "phone": rf"\bphone\b|contacts?|alarms?|text message|\btext\b|\bmy (?:{RELATION_WORDS})s?\b",
    "simple_note": r"simple ?note|\bnotes?\b",
    "gmail": r"gmail|e-?mails?|inbox",
    "amazon": r"amazon|wish ?list|\bcart\b",
    "todoist": r"todoist|to-?do list",
    "file_system": r"file system|\bfolder\b|\bfiles?\b|director(?:y|ies)",
    "splitwise": r"splitwise",
}
"""Words that bring an app into a task."""


@dataclass(frozen=True, slots=True)
class ActionWords:
    """How tasks ask for a change, and the APIs that make it."""

    name: str
    words: re.Pattern[str]
    apis: re.Pattern[str]
    settings: tuple[tuple[str, bool], ...] = ()
    """Arguments the call must have, where the API alone does not say it."""
    once: bool = False
    """Whether one call does it, rather than one for each item."""


def _action(name: str, words: str, apis: str, once: bool = False, **settings: bool) -> ActionWords:
    return ActionWords(
        name, re.compile(words, re.IGNORECASE), re.compile(rf"^(?:{apis})$"), tuple(settings.items()), once
    )


_LIKE = r"(?<!would )(?<!I'd )(?:\blike\b|\bgive a like\b)"
ACTIONS = (
    _action("like the songs", rf"{_LIKE}(?=.*\b(?:songs?|playlist|it)\b)(?!.*\b(?:venmo|payments?)\b)", "like_song"),
    _action("like the payments", rf"{_LIKE}(?=.*\b(?:venmo|payments?|transactions?)\b)", "like_transaction"),
    _action("unfollow", r"\bunfollow\b", r"unfollow_\w+"),
    _action(
        "follow the artists",
        r"(?<!not )(?<!already )(?<!I do not )\bfollow\b(?! yet| already)"
        r"(?=.*\bartists?\b|.*\bothers\b)|follow .*artist",
        "follow_artist",
    ),
    _action("move to the cart", r"\bmove\b.*\bcart\b", r"move_product_from_wish_list_to_cart|add_product_to_cart"),
    _action(
        "complete the tasks", r"\btasks?\b.*\bcompleted?\b|\bcomplete\b.*\btasks?\b", "update_task", is_completed=True
    ),
    _action("unpin the notes", r"\bunpin\b", "update_note", pinned=False),
    _action("pin the notes", r"\bpin\b", "update_note", pinned=True),
    _action("turn off the alarms", r"\b(?:turn|switch) off\b|\bdisable\b", "update_alarm", enabled=False),
    _action("turn on the alarms", r"\b(?:turn|switch) on\b|\benable\b", "update_alarm", enabled=True),
    _action("star the threads", r"\bstar\b", r"mark_(?:thread|email)_starred"),
    _action("deny the requests", r"\b(?:deny|reject|decline)\b", r"deny_\w+"),
    _action("approve the requests", r"\b(?:approve|accept)\b", r"approve_\w+|accept_\w+"),
    _action("send the text messages", r"\btext\b(?! file)|\btext message\b", "send_text_message"),
    _action("send the emails", r"\b(?:send|write)\b.*\be-?mail", r"send_email|reply_to_email|send_email_from_draft"),
    _action("delete", r"\bdelete\b", r"(?:delete|remove)_\w+"),
    _action("remove", r"\bremove\b|\btake\b.*\bout of\b", r"(?:remove|delete)_\w+"),
    _action(
        "create the playlist", r"\b(?:new|create an?|make an?)\b[^.?!]{0,24}\bplaylist\b", "create_playlist", once=True
    ),
    _action(
        "add the songs to the playlist",
        r"\b(?:new|create an?|make an?)\b[^.?!]{0,24}\bplaylist\b",
        "add_song_to_playlist",
    ),
    _action("write the note", r"\b(?:new|create an?|make an?|write)\b[^.?!]{0,40}\bnote\b", "create_note", once=True),
    _action("write the file", r"\b(?:new|create an?|make an?|save)\b[^.?!]{0,80}\bfile\b", "create_file", once=True),
)
"""The changes that tasks ask for."""

DONE_LISTS = {
    "follow_artist": frozenset({"show_following_artists"}),
    "like_song": frozenset({"show_liked_songs"}),
    "add_friend": frozenset({"search_friends"}),
}
"""Lists of what an action has already been done to: doing it again fails."""

FIELDS = (
    (re.compile(r"\bborn\b|birth", re.IGNORECASE), re.compile(r"birth")),
    (re.compile(r"\bdue\b", re.IGNORECASE), re.compile(r"due")),
    (re.compile(r"\badd(?:ed)?\b(?! up)", re.IGNORECASE), re.compile(r"added|created")),
    (re.compile(r"\bcreated\b", re.IGNORECASE), re.compile(r"created|added")),
    (re.compile(r"\b(?:received|sent|money)\b", re.IGNORECASE), re.compile(r"created|date|time")),
)
"""Which field a date is compared with, by the task's words."""
NUMBER_FIELDS = (
    (
        re.compile(r"\bseconds?\b|\bminutes?\b|\blong(?:er)?\b|\blasts?\b", re.IGNORECASE),
        re.compile(r"duration|length"),
    ),
    (re.compile(r"\bcosts?\b|\bpriced?\b|\bcheaper\b", re.IGNORECASE), re.compile(r"price|cost")),
    (re.compile(r"\brequests?\b|\bmoney\b|\$", re.IGNORECASE), re.compile(r"amount")),
    (re.compile(r"\brat(?:ed|ing)\b", re.IGNORECASE), re.compile(r"rating")),
    (re.compile(r"\blikes?\b", re.IGNORECASE), re.compile(r"like")),
    (re.compile(r"\bplay(?:ed|s)\b", re.IGNORECASE), re.compile(r"play")),
)
"""Which field a number is compared with."""
SUPERLATIVES = (
    (re.compile(r"\b(?:longest|longest duration|lasts the longest)\b", re.IGNORECASE), "max", re.compile(r"duration")),
    (re.compile(r"\bshortest\b", re.IGNORECASE), "min", re.compile(r"duration")),
    (re.compile(r"\b(?:most|highest|largest|greatest|latest|newest|most recent)\b", re.IGNORECASE), "max", None),
    (re.compile(r"\b(?:least|fewest|lowest|smallest|earliest|oldest)\b", re.IGNORECASE), "min", None),
)
"""Extremes: the words, the function that finds them, the field where it is certain."""

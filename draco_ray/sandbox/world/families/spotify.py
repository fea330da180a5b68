"""Families about the supervisor's music."""

from __future__ import annotations

import random
from datetime import timedelta

from draco_ray.sandbox.world import words
from draco_ray.sandbox.world.population import NOW, PAGE_LIMIT, Person, World
from draco_ray.sandbox.world.scripts import (
    DATE,
    FATAL,
    NUMBER,
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


def _song_ids(world: World, table: str, **equal: int) -> list[int]:
    return [row["song_id"] for row in world.where(table, **equal)]


class LikePlaylistSongs(Family):
    """Like every song of a playlist."""

    name = "like_playlist_songs"
    apps = ("spotify",)
    difficulty = 1
    fatal = FATAL
    wordings = (
        'Like all the songs in my "{title}" playlist on Spotify.',
        'I love my Spotify playlist "{title}". Please like every song in it.',
        'Go through my "{title}" playlist on Spotify and like each song in it.',
        'On Spotify, like every single song of my playlist called "{title}".',
    )

    def steps(self, faults: Faults) -> list[str]:
        if Fault.WRONG_SOURCE in faults:
            fetch = fetch_cells("song library", "spotify.show_song_library", faults)
            select = 'song_ids = [s["song_id"] for s in rows]'
        else:
            fetch = fetch_cells("playlist library", "spotify.show_playlist_library", faults)
            where = "!=" if Fault.WRONG_FILTER in faults else "=="
            select = f'song_ids = {{s for p in rows if p["title"] {where} title for s in p["song_ids"]}}'
        return [
            parameters_cell(title=TITLE),
            *fetch,
            cell("Collect the songs to like.", select, "print(len(song_ids))"),
            cell(
                "Like the songs.",
                "for song_id in song_ids:",
                "    apis.spotify.like_song(song_id=song_id, access_token=spotify_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        # A playlist on the first page would be found without reading the later ones.
        playlist = rng.choice(world.where("spotify.Playlist", user_id=person.id)[PAGE_LIMIT:])
        songs = _song_ids(world, "spotify.PlaylistSong", playlist_id=playlist["id"])
        return Draft(
            params={"title": playlist["title"]},
            changes=(
                Change("spotify.SongLike", ("user_id", "song_id"), added=tuple((person.id, song) for song in songs)),
            ),
            side_effects=(SideEffect("spotify.Song", touched=("like_count",)),),
        )


class CountLibrarySongs(Family):
    """Count the songs added to the library since a date."""

    name = "count_library_songs"
    apps = ("spotify",)
    difficulty = 1
    fatal = FATAL
    answers = True
    wordings = (
        "How many songs have I added to my Spotify song library on or after {date}?",
        "Count the songs in my Spotify song library that I added on or after {date}.",
        "Since {date}, that day included, how many songs did I add to my Spotify song library?",
        "Tell me how many songs of my Spotify song library were added on {date} or later.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "song library", "spotify.show_song_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "album library", "spotify.show_album_library"
        sign = "<" if Fault.WRONG_FILTER in faults else ">="
        return [
            parameters_cell(date=DATE),
            *fetch_cells(what, api, faults),
            cell("Count the songs.", f'answer = len([r for r in rows if r["added_at"] {sign} date])', "print(answer)"),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        since = NOW.replace(hour=0) - timedelta(days=rng.randrange(60, 420))
        songs = [row["created_at"] for row in world.where("spotify.UserLibrarySong", user_id=person.id)]
        albums = [row["created_at"] for row in world.where("spotify.UserLibraryAlbum", user_id=person.id)]
        answer = sum(moment >= since for moment in songs)
        first_page = songs[:PAGE_LIMIT], albums[:PAGE_LIMIT]
        wrong = {sum(moment >= since for moment in page) for page in (*first_page, albums)}
        if answer in wrong or answer == len(songs) - answer or answer == 0:
            return None
        return Draft(params={"date": since.date().isoformat()}, answer=answer)


class LongestLibrarySong(Family):
    """Name the longest song of the library."""

    name = "longest_library_song"
    apps = ("spotify",)
    difficulty = 1
    fatal = FATAL
    answers = True
    wordings = (
        "What is the title of the longest song in my Spotify song library?",
        "Which song in my Spotify song library is the longest? Give me its title.",
        "Tell me the title of the song with the longest duration in my Spotify song library.",
        "In my Spotify song library, which song lasts the longest? I need its title.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "song library", "spotify.show_song_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "liked songs", "spotify.show_liked_songs"
        pick = "min" if Fault.WRONG_FILTER in faults else "max"
        return [
            *fetch_cells(what, api, faults),
            cell(
                "Find the longest song.",
                f'answer = {pick}(rows, key=lambda s: s["duration"])["title"]',
                "print(answer)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        songs = [world.get("spotify.Song", s) for s in _song_ids(world, "spotify.UserLibrarySong", user_id=person.id)]
        longest = max(songs, key=lambda song: song["duration"])
        return None if longest in songs[:PAGE_LIMIT] else Draft(answer=longest["title"])


class RemoveLongSongs(Family):
    """Remove songs over a length from the library."""

    name = "remove_long_songs"
    apps = ("spotify",)
    difficulty = 2
    fatal = FATAL
    wordings = (
        "Remove all songs longer than {limit} seconds from my Spotify song library.",
        "My Spotify song library should have no song that is longer than {limit} seconds. Remove those songs from it.",
        "Please take every song longer than {limit} seconds out of my Spotify song library.",
        "Clean up my Spotify song library: remove each song that lasts more than {limit} seconds.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "song library", "spotify.show_song_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "liked songs", "spotify.show_liked_songs"
        sign = "<" if Fault.WRONG_FILTER in faults else ">"
        return [
            parameters_cell(limit=NUMBER),
            *fetch_cells(what, api, faults),
            cell("Select the songs.", f'songs = [s for s in rows if s["duration"] {sign} limit]', "print(len(songs))"),
            cell(
                "Remove the songs.",
                "for song in songs:",
                '    apis.spotify.remove_song_from_library(song_id=song["song_id"], access_token=spotify_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class FollowLibraryArtists(Family):
    """Follow the artists of the library's songs, leaving out those already followed."""

    name = "follow_library_artists"
    apps = ("spotify",)
    difficulty = 3
    fatal = FATAL
    wordings = (
        "Follow all the artists of the songs in my Spotify song library whom I do not follow yet.",
        "Make sure that I follow on Spotify every artist who has a song in my song library.",
        "I want to follow each artist of my Spotify song library. Some of them I follow already; follow the others.",
        "On Spotify, follow the artists of all songs in my song library, except those I already follow.",
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "song library", "spotify.show_song_library"
        if Fault.WRONG_SOURCE in faults:
            what, api = "liked songs", "spotify.show_liked_songs"
        new = "artists & followed" if Fault.WRONG_FILTER in faults else "artists - followed"
        return [
            *fetch_cells(what, api, faults),
            cell(
                "Collect the artists.", 'artists = {a["id"] for s in rows for a in s["artists"]}', "print(len(artists))"
            ),
            *fetch_cells("followed artists", "spotify.show_following_artists", faults & {Fault.FIRST_PAGE_ONLY}),
            cell(
                "Select the new artists.",
                'followed = {a["artist_id"] for a in rows}',
                f"new = {new}",
                "print(len(new))",
            ),
            cell(
                "Follow the new artists.",
                "for artist_id in new:",
                "    apis.spotify.follow_artist(artist_id=artist_id, access_token=spotify_token)",
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
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


class PlaylistOfLikes(Family):
    """Make a playlist of the liked songs."""

    name = "playlist_of_likes"
    apps = ("spotify",)
    difficulty = 2
    fatal = FATAL - {Fault.WRONG_FILTER}
    wordings = (
        'Create a Spotify playlist called "{title}" with all the songs I have liked.',
        'Put all my liked songs on Spotify into a new playlist named "{title}".',
        'Make a new Spotify playlist "{title}" that has every song I have liked.',
        'I would like a new playlist titled "{title}" on Spotify, made of all my liked songs.',
    )

    def steps(self, faults: Faults) -> list[str]:
        what, api = "liked songs", "spotify.show_liked_songs"
        if Fault.WRONG_SOURCE in faults:
            what, api = "song library", "spotify.show_song_library"
        return [
            parameters_cell(title=TITLE),
            *fetch_cells(what, api, faults),
            cell(
                "Create the playlist.",
                "playlist = apis.spotify.create_playlist(title=title, access_token=spotify_token)",
                'playlist_id = playlist["playlist_id"]',
            ),
            cell(
                "Add the songs to the playlist.",
                "for s in rows:",
                "    apis.spotify.add_song_to_playlist(",
                '        playlist_id=playlist_id, song_id=s["song_id"], access_token=spotify_token)',
            ),
        ]

    def draft(self, world: World, person: Person, rng: random.Random) -> Draft | None:
        title = rng.choice(words.NEW_TITLES)
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


FAMILIES = (
    LikePlaylistSongs,
    CountLibrarySongs,
    LongestLibrarySong,
    RemoveLongSongs,
    FollowLibraryArtists,
    PlaylistOfLikes,
)

"""A run directory's copy in an object store is a run at every moment, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from draco_ray.commands.groups.runs import runs_show
from draco_ray.config.load import dump_config, load_config
from draco_ray.errors import ConfigError, DamagedRun, StoreError
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.remote import location as places
from draco_ray.runs.remote.claim import Claim, ClaimLost, claim_run
from draco_ray.runs.remote.copier import Copier, listing, restore
from draco_ray.runs.remote.location import (
    RunLocation,
    begun,
    fetch_run_for_reading,
    open_working_folder,
    parse_run_location,
    run_location,
)
from draco_ray.runs.remote.manifest import Marker, latest_manifest
from draco_ray.runs.remote.store import ObjectStore
from draco_ray.runs.store import RunStore
from tests.support.killed import SimulatedKill
from tests.support.object_store import MemoryStore
from tests.support.small_run import TASKS, a_call, small_run, write_group

CONFIG = dump_config(load_config())
CALLS = 7
"""Rows of judge calls in a piece."""
LARGE = 2**20
"""Bytes: from here on a file is an object of its own."""


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run, but for those of this machine."""
    return {path: (folder / path).read_bytes() for path in listing(folder)}


class SmallRun:
    """A run that goes on by small pieces."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory.create(path, CONFIG)
        self.store = RunStore(self.directory)
        self.path = path
        self.calls = 0
        with self.cache() as cache:
            cache.execute("CREATE TABLE replies (key TEXT PRIMARY KEY, answer TEXT)")

    @contextlib.contextmanager
    def cache(self) -> Any:
        self.directory.judge_cache.mkdir(exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.directory.judge_cache / "replies.sqlite")) as connection:
            yield connection
            connection.commit()

    def piece(self, step: int, task: str) -> None:
        """A reply, its row, and a group."""
        self.calls += 1
        with self.cache() as cache:
            cache.execute("INSERT INTO replies VALUES (?, ?)", (f"{step}-{task}", "x" * 500))
        self.store.write(
            "judge_calls", step, f"{task}-stage1", rows.call_rows(step, [a_call("stage1", step, task, None)])
        )
        write_group(self.store, step, task)

    def finish(self, step: int) -> None:
        """The step's end, and its checkpoint."""
        checkpoint = self.directory.checkpoint(step)
        unfinished = checkpoint.with_name(f".{checkpoint.name}.unfinished")
        unfinished.mkdir(parents=True)
        (unfinished / "adapter_model.safetensors").write_bytes(bytes([step]) * (LARGE + step))
        (unfinished / "counters.json").write_text(json.dumps({"updates": step}))
        unfinished.rename(checkpoint)
        self.store.finish_step(step, {"step": step})


def consistent(folder: Path) -> tuple[int, int, list[int]]:
    """Replies, judge calls and checkpoints of a run that reads back whole; what rows are made of is there."""
    run = RunDirectory.open(folder)
    with contextlib.closing(sqlite3.connect(run.judge_cache / "replies.sqlite")) as cache:
        assert cache.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        replies = cache.execute("SELECT count(*) FROM replies").fetchone()[0]
    calls = run.table("judge_calls").num_rows
    assert calls <= CALLS * replies
    assert [line["step"] for line in run.metrics()] == run.checkpoint_steps()
    for step in run.checkpoint_steps():
        assert (run.checkpoint(step) / "adapter_model.safetensors").stat().st_size == LARGE + step
        assert set(run.table("groups", step).column("task_id").to_pylist()) == set(TASKS)
    return replies, calls, run.checkpoint_steps()


def copier_of(store: ObjectStore, folder: Path) -> Copier:
    return Copier(store, folder, claim_run(store, lease=0.0))


@pytest.mark.deployment
def test_a_copier_killed_at_any_write_leaves_a_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """Every change of the store is a place to die at, before it and behind it, and no finished row is lost."""
    killed = 0
    for point in range(10_000):
        store, run = MemoryStore(), SmallRun(tmp_path / "run")
        store.left = point
        with contextlib.suppress(SimulatedKill):
            copier = copier_of(store, run.path)
            copier.tidy(store)
            for step in (1, 2):
                for task in TASKS:
                    run.piece(step, task)
                    copier.copy(store)
                run.finish(step)
                copier.copy(store)
            store.left = None
        died = store.left is not None
        killed += died
        store.left = None
        there = restore(store, tmp_path / "there")
        assert there is not None or died
        if there is not None:
            _, calls, checkpoints = consistent(tmp_path / "there")
            # At most the copy that was under way is not there.
            assert calls >= CALLS * (run.calls - 1)
            assert checkpoints in (run.directory.checkpoint_steps(), run.directory.checkpoint_steps()[:-1])
            marker = Marker.read(run.path)
            assert marker is not None
            assert there.name in marker.manifests
        # Whoever goes on copies all of it, and leaves nothing behind.
        again = copier_of(store, run.path)
        again.tidy(store)
        again.copy(store)
        again.tidy(store)
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        last = restore(store, tmp_path / "there")
        assert last is not None
        assert contents(tmp_path / "there").keys() == contents(run.path).keys()
        assert consistent(tmp_path / "there") == consistent(run.path)
        kept = {name for manifest in again._read.values() for name in manifest.objects}
        assert set(store.names("objects")) == kept
        shutil.rmtree(tmp_path / "there")
        shutil.rmtree(run.path)
        if not died:
            break
    assert killed > 30


def test_a_run_is_copied_while_it_is_written(tmp_path: Path) -> None:
    """Each copy that is taken while another thread writes, gathers and removes is a run."""
    store, run = MemoryStore(), SmallRun(tmp_path / "run")
    copier = copier_of(store, run.path)

    def write() -> None:
        for step in range(1, 9):
            for task in TASKS:
                run.piece(step, task)
            run.finish(step)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive() or copier.copy(store):
        copier.copy(store)
        restore(store, tmp_path / "there")
        run_there = RunDirectory.open(tmp_path / "there")
        run_there.table("judge_calls")
        assert set(run_there.checkpoint_steps()) - {line["step"] for line in run_there.metrics()} <= {
            max(run_there.checkpoint_steps(), default=0)
        }
    writer.join()
    copier.copy(store)
    restore(store, tmp_path / "there")
    assert consistent(tmp_path / "there") == (8 * len(TASKS), 8 * len(TASKS) * CALLS, list(range(1, 9)))


def test_names_survive_and_nobody_else_may_read(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run")
    odd = ["a b%20#?&ü☃.txt", "logs/driver #1.jsonl", "tables/x/.hidden.parquet"]
    for name in odd:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(name)
    (run.path / "half.tmp").write_text("half")
    url = f"file://{tmp_path}/store/50% #1 ü"
    store = ObjectStore(url)
    assert Copier(store, run.path, claim_run(store)).copy(store)
    restore(store, tmp_path / "there")
    for name in odd:
        assert (tmp_path / "there" / name).read_text() == name
    assert not (tmp_path / "there" / "half.tmp").exists()
    assert (tmp_path / "store" / "50% #1 ü" / "manifests").is_dir()
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o700
    files = (path for path in (tmp_path / "there").rglob("*") if path.is_file())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_what_is_damaged_in_the_store_is_named(tmp_path: Path) -> None:
    store, run = MemoryStore(), SmallRun(tmp_path / "run")
    copier = copier_of(store, run.path)
    copier.copy(store)
    run.piece(1, TASKS[0])
    copier.copy(store)
    names = sorted(store.names("manifests"))
    whole = dict(store.objects)
    # Half a manifest is none: the one before it counts.
    store.objects[f"manifests/{names[-1]}"] = store.objects[f"manifests/{names[-1]}"][:-10]
    assert (found := latest_manifest(store)) is not None
    assert found.name == names[-2]
    store.objects = {name: data[:-1] if name.startswith("objects/") else data for name, data in whole.items()}
    with pytest.raises(DamagedRun, match="differs from the manifest"):
        restore(store, tmp_path / "there")
    store.objects = {name: data for name, data in whole.items() if not name.startswith("objects/")}
    with pytest.raises(DamagedRun, match="is missing"):
        restore(store, tmp_path / "there2")


@pytest.mark.parametrize("path", ["../out", "/etc/out", "tables/../../out", ""])
def test_a_manifest_that_leads_out_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    from draco_ray.runs.remote.manifest import Entry, Manifest

    store = MemoryStore()
    name, data = Manifest(1, 1, {path: Entry(1, "0" * 64, "0" * 64)}).encoded()
    store.write(f"manifests/{name}", data)
    with pytest.raises(DamagedRun, match="is not a file of a run directory"):
        restore(store, tmp_path / "there")


@pytest.mark.parametrize("version", [0, 2])
def test_a_manifest_of_another_schema_version_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    from draco_ray.runs.remote import manifest

    store = MemoryStore()
    monkeypatch.setattr(manifest, "SCHEMA_VERSION", version)
    name, data = manifest.Manifest(1, 1, {}).encoded()
    monkeypatch.undo()
    store.write(f"manifests/{name}", data)
    with pytest.raises(
        DamagedRun, match=f"schema version {version}, expected 1; use the draco-ray that wrote it"
    ) as refusal:
        latest_manifest(store)
    assert "\n" not in str(refusal.value)


def test_two_drivers_never_have_one_run(tmp_path: Path) -> None:
    store = MemoryStore()
    first = claim_run(store)
    beats = iter(range(100))

    def sleep(seconds: float) -> None:
        # The other one lives.
        if next(beats) == 1:
            first.renew(store)

    with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* is using this run"):
        claim_run(store, sleep=sleep)
    first.check(store)
    # It is stopped for longer than its claim lasts: another takes over, and it finds out before it writes.
    second = claim_run(store, sleep=lambda seconds: None)
    second.check(store)
    with pytest.raises(ClaimLost, match="another driver has taken over this run"):
        first.check(store)
    assert second.epoch == first.epoch + 1
    second.release(store)
    assert claim_run(store).epoch >= 1


def test_drivers_that_begin_at_once_are_never_two() -> None:
    """Every order in which two claims may meet: at most one of them is granted."""

    class Meeting(MemoryStore):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at, self.asked, self.granted = at, 0, 0

        def names(self, folder: str) -> list[str]:
            self.asked += 1
            if self.asked == self.at:
                self._other()
            found = super().names(folder)
            if self.asked == -self.at:
                self._other()
            return found

        def _other(self) -> None:
            with contextlib.suppress(ConfigError):
                claim_run(self, sleep=self._lives)
                self.granted += 1

        def _lives(self, seconds: float) -> None:
            for name in super().names("claims"):
                claim = json.loads(self.objects[f"claims/{name}"])
                self.objects[f"claims/{name}"] = json.dumps({**claim, "beats": claim["beats"] + 1}).encode()

    for at in [*range(1, 8), *range(-8, 0)]:
        store = Meeting(at)
        with contextlib.suppress(ConfigError):
            claim_run(store, sleep=store._lives)
            store.granted += 1
        assert store.granted == 1, at


def test_a_claim_of_a_process_that_has_ended_here_is_not_waited_for() -> None:
    store = MemoryStore()
    Claim(store, 3)
    (name,) = store.names("claims")
    with subprocess.Popen(["true"]) as process:
        pass
    ended = json.loads(store.read(f"claims/{name}")) | {"pid": process.pid}
    store.write(f"claims/{name}", json.dumps(ended).encode())

    def sleep(seconds: float) -> None:
        raise AssertionError

    assert claim_run(store, sleep=sleep).epoch == 4
    assert len(store.names("claims")) == 1


def test_a_driver_that_was_thought_dead_changes_nothing(tmp_path: Path) -> None:
    store, run = MemoryStore(), SmallRun(tmp_path / "run")
    copier = copier_of(store, run.path)
    copier.copy(store)
    claim_run(store, lease=0.0)
    run.piece(1, TASKS[0])
    before = {name for name in store.objects if name.startswith("manifests/")}
    with pytest.raises(ClaimLost):
        copier.copy(store)
    assert {name for name in store.objects if name.startswith("manifests/")} == before


class FailingFiles:
    """A file system of pyarrow whose requests fail so many times in a row."""

    def __init__(self, files: Any, failures: int, error: OSError) -> None:
        self.files, self.failures, self.error = files, failures, error

    def __getattr__(self, name: str) -> Any:
        if name != "type_name" and self.failures:
            self.failures -= 1
            raise self.error
        return getattr(self.files, name)


def failing_store(tmp_path: Path, failures: int, error: OSError, said: list[str], seconds: float = 60) -> ObjectStore:
    store = ObjectStore(f"file://{tmp_path}/store", said.append, seconds=seconds)
    store.first_wait = 0.001
    store._files = FailingFiles(store._files, failures, error)
    return store


def test_an_outage_is_said_once_and_waited_out(tmp_path: Path) -> None:
    said: list[str] = []
    # What is in a name says nothing of the answer.
    store = failing_store(tmp_path, 5, OSError("AWS Error SLOW_DOWN:\n 503 of objects/a403"), said)
    store.retrying(60, threading.Event()).write("a", b"1")
    assert store.read("a") == b"1"
    assert said == [
        f"{store.url}: AWS Error SLOW_DOWN: 503 of objects/a403; trying again, the run continues in its local folder",
        f"{store.url}: the store answers again",
    ]
    with pytest.raises(StoreError, match="ACCESS_DENIED"):
        failing_store(tmp_path, 10**9, OSError("ACCESS_DENIED"), said).write("a", b"1")
    with pytest.raises(StoreError, match="cannot be used: gone"):
        failing_store(tmp_path, 10**9, OSError("gone"), said, seconds=0).write("a", b"1")


def test_a_copy_waits_an_outage_out(tmp_path: Path) -> None:
    said: list[str] = []
    store = failing_store(tmp_path, 0, OSError("503"), said)
    run = SmallRun(tmp_path / "run")
    copier = copier_of(store, run.path)
    copier.copy(store)
    run.piece(1, TASKS[0])
    store._files.failures = 2
    assert copier.copy(store.retrying(60, threading.Event()))
    assert said == [
        f"{store.url}: 503; trying again, the run continues in its local folder",
        f"{store.url}: the store answers again",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        "When listing objects: AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2 operation: The key does not exist",
        "When listing objects: AWS Error SIGNATURE_DOES_NOT_MATCH during ListObjectsV2 operation: It is wrong",
        "AWS Error UNKNOWN (HTTP status 403) during PutObject operation: Unable to parse ExceptionName: ExpiredToken",
        "AWS Error UNKNOWN (HTTP status 301) during PutObject operation: ExceptionName: PermanentRedirect",
    ],
)
def test_a_store_that_refuses_the_key_is_not_asked_again(tmp_path: Path, answer: str) -> None:
    said: list[str] = []
    with pytest.raises(StoreError, match=re.escape(answer)):
        failing_store(tmp_path, 10**9, OSError(answer), said, seconds=3600).write("a", b"1")
    assert said == []


def test_before_a_run_starts_an_outage_message_does_not_mention_it(tmp_path: Path) -> None:
    said: list[str] = []
    store = failing_store(tmp_path, 1, OSError("503"), said)
    store.write("a", b"1")
    assert said == [f"{store.url}: 503; trying again", f"{store.url}: the store answers again"]


@pytest.mark.parametrize("root", ["S3://bucket/runs", "s3:/bucket/runs", "file:/runs", "GS://b"])
def test_what_is_nearly_a_url_is_no_folder(root: str) -> None:
    with pytest.raises(ConfigError, match=r"run.root: .*not a folder or a URL; expected .* s3://BUCKET/PREFIX"):
        load_config(None, [f"run.root={root}"])


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"file://{tmp_path}/store/über 1%#"


def a_place(url: str, local: Path | None = None) -> RunLocation:
    config = load_config(None, ["run.name=a run", f"run.local={local}" if local else "seed=0"]).run
    return run_location(config.model_copy(update={"root": url}), "a run")


def test_a_run_goes_on_here_and_on_a_machine_that_has_nothing(tmp_path: Path, url: str) -> None:
    said: list[str] = []
    here, elsewhere = a_place(url, tmp_path / "here"), a_place(url, tmp_path / "elsewhere")
    assert not begun(here, said.append)
    with open_working_folder(here, said.append, new=True) as path:
        SmallRun(path).piece(1, TASKS[0])
    assert said == [f"copied to {url}/a run"]
    assert begun(here, said.append)
    assert begun(elsewhere, said.append)
    with pytest.raises(ConfigError, match="already exists"), open_working_folder(elsewhere, said.append, new=True):
        pass
    with open_working_folder(elsewhere, said.append) as path:
        assert contents(path).keys() == contents(here.local).keys()
        assert consistent(path) == consistent(here.local)
        (path / "more").write_text("of there")
    # What is here is older now: it is kept aside.
    with open_working_folder(here, said.append) as path:
        assert (path / "more").read_text() == "of there"
    assert contents(here.local.with_name("a run.before-1")).keys() == contents(here.local).keys() - {"more"}
    assert any("the run continued elsewhere" in line for line in said)
    assert parse_run_location(here.local) == here
    assert fetch_run_for_reading(f"{url}/a run").name == "a run"
    assert consistent(fetch_run_for_reading(f"{url}/a run", checkpoints=True)) == consistent(here.local)
    with pytest.raises(ConfigError, match="no run found"):
        fetch_run_for_reading(f"{url}/another")


def test_adapters_that_stay_in_the_store_are_counted(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = a_place(url, tmp_path / "here")
    with open_working_folder(place, lambda line: None, new=True) as path:
        small_run(tmp_path / "made")
        shutil.copytree(tmp_path / "made", path, dirs_exist_ok=True)
        for step in (1, 12):
            adapter = path / "checkpoints" / f"step{step:05d}" / "adapter"
            adapter.mkdir(parents=True)
            (adapter / "adapter_config.json").write_text("{}")
    runs_show(f"{url}/a run")
    assert ", 2 adapters" in " ".join(capsys.readouterr().out.split())
    assert not (fetch_run_for_reading(f"{url}/a run") / "checkpoints").exists()
    runs_show(str(place.local))
    assert ", 2 adapters" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_is_ahead_of_its_copy_is_what_goes_on(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end could not copy: exit with one line, and the next start copies it."""
    place = a_place(url)
    said: list[str] = []
    with open_working_folder(place, said.append) as path:
        run = SmallRun(path)
    monkeypatch.setattr(places, "END_SECONDS", 0.0)

    def broken(*arguments: object) -> None:
        raise StoreError("503 Slow Down")

    def work() -> None:
        with monkeypatch.context() as patch, open_working_folder(place, said.append):
            run.piece(1, TASKS[0])
            patch.setattr(ObjectStore, "write", broken)

    with pytest.raises(StoreError) as refusal:
        work()
    line = str(refusal.value)
    assert "\n" not in line
    assert f"draco train --resume '{place.local}'" in line
    assert "503 Slow Down" in line
    with open_working_folder(parse_run_location(place.local), said.append) as path:
        assert RunDirectory.open(path).table("judge_calls").num_rows == CALLS
    assert RunDirectory.open(fetch_run_for_reading(f"{url}/a run")).table("judge_calls").num_rows == CALLS


def test_somebody_elses_folder_does_not_say_where_it_is_copied(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    run = SmallRun(tmp_path / "run")
    Marker(url).write(run.path)
    assert parse_run_location(run.path).url == url
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "yours"))
    with pytest.raises(ConfigError, match="somebody else made this folder, and it would be copied to"):
        parse_run_location(run.path)
    assert parse_run_location(run.path, trust=True).url == url


@pytest.mark.parametrize(
    ("root", "problem"),
    [
        ("s4://bucket/prefix", "cannot be opened"),
        ("s3://key:secret@bucket/prefix", "a URL must not contain a password"),
        ("file://", "not a URL"),
    ],
)
def test_a_root_that_is_none_is_one_line(root: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal, open_working_folder(a_place(root), print):
        pass
    assert "\n" not in str(refusal.value)
    assert "secret" not in str(refusal.value)

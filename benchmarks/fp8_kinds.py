"""Kinds of pages to compare, and the policy that a server of one needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines import write_policy
from sglang_ext.calibration.measure import default_text, split_text
from sglang_ext.calibration.schemes import SCHEMES, layers_of, learn
from sglang_ext.calibration.treatment import load_model
from sglang_ext.demo_model import demo_model_path
from sglang_ext.tiering.quantizer import FORMATS
from sglang_ext.tiering.scales import Scales, checkpoint_hash, save_scales

__all__ = ["Kind", "write_policies"]

_CALIBRATION_TOKENS = 8_192


@dataclass(frozen=True)
class Kind:
    """One kind of page: its dtype, and the number in SCHEMES of its scheme (0: a plain cast)."""

    name: str
    dtype: str
    scheme: int = 0


def write_policies(folder: Path, kinds: Sequence[Kind], tenant: str) -> dict[str, Path]:
    """Write a policy with ``tenant`` for each kind, and the scales that it names.

    The scales come from Python's own reference, whatever is measured later.
    """
    plain = write_policy(folder, [tenant]).read_text(encoding="utf-8")
    policies = {kind.name: folder / f"{kind.name}.yaml" for kind in kinds}
    for kind in kinds:
        engine = f"engine: {{kv_scales: {_write_scales(kind, folder)}}}\n" if kind.scheme else ""
        policies[kind.name].write_text(plain + engine, encoding="utf-8")
    return policies


def _write_scales(kind: Kind, folder: Path) -> Path:
    path = folder / f"{kind.name}.safetensors"
    model_folder, format = demo_model_path(), FORMATS[kind.dtype]
    chunks = split_text(model_folder, default_text(), _CALIBRATION_TOKENS)
    statistics = learn(load_model(model_folder), chunks)
    layers = layers_of(statistics, format, SCHEMES[kind.scheme])
    save_scales(path, Scales(format, kind.name, checkpoint_hash(model_folder), layers))
    return path

"""Build of the distribution ``sglang-ext``: top-level folders become ``sglang_ext.<folder>``."""

from setuptools import setup

SUBPACKAGES = ["radix", "tiering", "tenancy", "patches"]

setup(
    packages=[
        "sglang_ext",
        "sglang_ext.audit",
        "sglang_ext.calibration",
        "sglang_ext.gateway",
        "sglang_ext.observe",
        "sglang_ext.plan",
        *(f"sglang_ext.{name}" for name in SUBPACKAGES),
    ],
    package_dir={f"sglang_ext.{name}": name for name in SUBPACKAGES},
)

"""The policy's and the machine's defaults, and that a given flag wins over each."""

from pathlib import Path

import pytest

from sglang_ext.errors import UnsupportedError
from sglang_ext.launch_flags import given_flags, own_arguments, with_defaults
from sglang_ext.tenancy.loader import parse_policy

_POLICY = parse_policy(
    "version: 1\nengine: {page_size: 32, kv_cache_dtype: bf16}\ntenants: {a: {}}"
)
_DEMO = {"--model-path": "/demo", "--served-model-name": "demo"}


def _values(argv: list[str]) -> dict[str, str]:
    """Return the value that argparse would take for each flag: the last one."""
    return {flag: value for flag, value in zip(argv, argv[1:], strict=False) if flag[:2] == "--"}


def _flags(*argv: str, on_cpu: bool = True, demo: bool = True) -> dict[str, str]:
    return _values(with_defaults(argv, _POLICY, on_cpu=on_cpu, demo_model=_DEMO if demo else None))


def test_policy_and_machine_decide() -> None:
    flags = _flags()
    assert flags["--page-size"] == "32"
    assert flags["--kv-cache-dtype"] == "bf16"
    assert flags["--device"] == "cpu"
    assert flags["--model-path"] == "/demo"
    assert flags["--radix-cache-backend"] == "sglang_ext"


@pytest.mark.parametrize(
    "given", [("--page-size", "1"), ("--page-size=1",), ("--page_size", "1")], ids=str
)
def test_a_given_flag_wins(given: tuple[str, ...]) -> None:
    argv = with_defaults(given, _POLICY, on_cpu=True, demo_model=None)
    assert "32" not in argv
    assert argv[-len(given) :] == list(given)


def test_a_given_pool_size_replaces_both_pool_defaults() -> None:
    assert "--max-total-tokens" not in _flags("--mem-fraction-static", "0.5")


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ((), "256"),
        (("--page-size", "24"), "240"),
        (("--page-size=1024",), "1024"),
        (("--page-size", "one"), "256"),
        (("--page-size", "0"), "256"),
    ],
)
def test_a_step_on_a_cpu_is_short_and_holds_whole_pages(
    given: tuple[str, ...], tokens: str
) -> None:
    assert _flags(*given)["--chunked-prefill-size"] == tokens
    argv = [*given, "--chunked-prefill-size", "64"]
    assert with_defaults(argv, _POLICY, on_cpu=True, demo_model=None).count(argv[-2]) == 1
    assert "--chunked-prefill-size" not in _flags(*given, on_cpu=False)


def test_an_accelerator_gets_no_cpu_flags() -> None:
    assert "--device" not in _flags(on_cpu=False)


def test_sglangs_configuration_file_counts_as_given(tmp_path: Path) -> None:
    path = tmp_path / "sglang.yaml"
    path.write_text("page-size: 1\nkv_cache_dtype: auto\n", encoding="utf-8")
    assert {"--page-size", "--kv-cache-dtype"} <= given_flags(["--config", str(path)])
    assert {"--page-size"} <= given_flags([f"--config={path}"])
    assert given_flags(["--config", str(tmp_path / "missing.yaml")]) == {"--config"}
    assert given_flags(["--config"]) == {"--config"}


def test_another_cache_backend_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="radix-cache-backend"):
        _flags("--radix-cache-backend", "other")


def test_our_own_options_are_taken_out() -> None:
    own, rest = own_arguments(["--tenant-policy", "p.yaml", "--port", "1", "--tp", "2"])
    assert own.tenant_policy == Path("p.yaml")
    assert rest == ["--port", "1", "--tp", "2"]


def test_without_a_policy_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        own_arguments([])
    assert ended.value.code == 2
    assert "--tenant-policy" in capsys.readouterr().err

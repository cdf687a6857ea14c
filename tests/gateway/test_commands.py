"""Each engine's command line, and what the machine has for it."""

from argparse import Namespace
from pathlib import Path

import pytest

from sglang_ext.errors import UnsupportedError
from sglang_ext.gateway.commands import Address, address_of, check_flags, engine_command
from sglang_ext.gateway.machine import free_ports, gpu_variables, visible_gpus
from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.launch_flags import own_arguments


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], Address("127.0.0.1", 30000)),
        (["--port", "8000", "--tp", "2"], Address("127.0.0.1", 8000)),
        (["--port=8000", "--host=0.0.0.0"], Address("0.0.0.0", 8000)),
    ],
)
def test_the_gateway_takes_the_address_that_was_meant(flags: list[str], address: Address) -> None:
    assert address_of(flags) == address


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="port"):
        address_of(["--port", "many"])


@pytest.mark.parametrize(
    "flag", ["--nccl-port", "--kv-events-config", "--ssl-keyfile", "--nnodes", "--nccl_port=3"]
)
def test_what_two_engines_cannot_share_is_refused(flag: str) -> None:
    name = flag.partition("=")[0].replace("_", "-")
    with pytest.raises(UnsupportedError, match=f"{name} is refused with several engines"):
        check_flags([flag, "x"])


def test_an_address_in_a_file_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("port: 4000\n")
    with pytest.raises(UnsupportedError, match="--port belongs on the command line"):
        check_flags(["--config", str(config)])
    check_flags(["--config", str(config), "--port", "1"])


def test_the_tenants_flags_come_after_the_common_ones_and_the_address_last() -> None:
    own, flags = own_arguments(
        ["--tenant-policy", "all.yaml", "--tp", "4", "--audit-log", "audit", "--engines", "2"]
    )
    spec = EngineSpec("bank", None, 0, 1, flags=("--tp", "2", "--port", "1"))
    command = engine_command(spec, Path("bank.yaml"), 4321, own, [*flags, "--host", "0.0.0.0"])
    assert command[1:3] == ["-m", "sglang_ext.launch_server"]
    again, rest = own_arguments(command[3:])
    expected = Namespace(
        tenant_policy=Path("bank.yaml"),
        usage_db=None,
        audit_log=Path("audit"),
        log_json=False,
        engines=1,
        nodes=None,
        gateway_secret=None,
    )
    assert again == expected
    assert rest == [
        *("--tp", "4", "--host", "0.0.0.0", "--tp", "2", "--port", "1"),
        *("--host", "127.0.0.1", "--port", "4321"),
    ]
    assert address_of(rest) == Address("127.0.0.1", 4321)


def test_gpus_are_those_of_the_driver_and_of_the_environment(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert visible_gpus({}, tmp_path) == (0, 1, 2, 3)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}, tmp_path) == (2, 3)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2"}, tmp_path / "none") == ()
    with pytest.raises(UnsupportedError, match="has to name numbers"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1234"}, tmp_path)
    assert gpu_variables((6, 7)) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert gpu_variables(()) == {}


def test_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20


def test_no_engines_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        own_arguments(["--tenant-policy", "all.yaml", "--engines", "0"])
    assert "--engines: expected a number from 1 on" in capsys.readouterr().err

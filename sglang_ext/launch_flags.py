"""From our command line and a policy to SGLang's command line. A flag that is given wins."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from sglang_ext.errors import UnsupportedError
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tier_flags import tier_flags, tier_switches

__all__ = ["given_flags", "own_arguments", "with_defaults"]

_CPU_DEFAULTS = {"--device": "cpu", "--sampling-backend": "pytorch"}
_CPU_STEP_TOKENS = 256
"""What a tenant waits for at most is a step: about a quarter of a second on two cores."""
_CPU_POOL = {"--max-total-tokens": "32768", "--mem-fraction-static": "0.3"}
_ALIASES = {
    "--model": "--model-path",
    "--enable-hicache": "--enable-hierarchical-cache",
}
_BACKEND_FLAG = "--radix-cache-backend"
_BACKEND = "sglang_ext"
_PRIORITIES = "--enable-priority-scheduling"


def own_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split ``argv`` into our own options and the flags that go to SGLang."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ext.launch_server",
        description="Start SGLang with a tenant policy. Every flag of SGLang may follow; "
        "see: python -m sglang.launch_server --help",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tenant-policy", type=Path, required=True, metavar="FILE", help="YAML tenant policy"
    )
    parser.add_argument(
        "--usage-db",
        type=Path,
        metavar="FILE",
        help="SQLite file for usage by tenant and hour; without it usage is not kept",
    )
    parser.add_argument(
        "--audit-log",
        type=Path,
        metavar="FILE",
        help="who changed what, as JSON lines; without it they go to the server's log",
    )
    parser.add_argument(
        "--log-json", action="store_true", help="write logs as JSON, one object a line"
    )
    parser.add_argument(
        "--engines",
        type=int,
        default=1,
        metavar="N",
        help="replicas of the engine that serves the tenants without one of their own; "
        "0 is possible with --nodes",
    )
    parser.add_argument(
        "--nodes",
        type=Path,
        metavar="FILE",
        help="YAML file of replicas on other machines, and of the secret that they share",
    )
    parser.add_argument(
        "--gateway-secret",
        type=Path,
        metavar="FILE",
        help="be such a replica: answer only the gateway that has this secret",
    )
    own, flags = parser.parse_known_args(argv)
    _check_engines(parser, own)
    return own, flags


def _check_engines(parser: argparse.ArgumentParser, own: argparse.Namespace) -> None:
    """End with a message where the options about engines do not go together."""
    if own.engines < 1 and own.nodes is None:
        parser.error("argument --engines: expected a number from 1 on")
    if own.engines < 0:
        parser.error("argument --engines: expected a number from 0 on")
    if own.gateway_secret is not None and (own.nodes is not None or own.engines != 1):
        parser.error(
            "argument --gateway-secret: a node is one engine; leave --engines, --nodes out"
        )


def given_flags(argv: Sequence[str]) -> set[str]:
    """Return the flags in ``argv`` and in the file of SGLang's ``--config``, without values."""
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    names = {_ALIASES.get(flag, flag) for flag in flags}
    return names | _flags_of_config(argv) if "--config" in names else names


def with_defaults(
    argv: Sequence[str], policy: Policy, *, on_cpu: bool, demo_model: Mapping[str, str] | None
) -> list[str]:
    """Return SGLang's ``argv`` with what the policy and the machine decide in front.

    ``demo_model`` holds the flags that select the bundled model, or None where one was named.
    Raises UnsupportedError for a cache backend other than ours.
    """
    given = given_flags(argv)
    if _BACKEND_FLAG in given:
        raise UnsupportedError(f"{_BACKEND_FLAG} is set by sglang_ext; leave it out")
    defaults = {_BACKEND_FLAG: _BACKEND, **_engine_flags(policy), **(demo_model or {})}
    defaults |= tier_flags(policy, given, on_cpu=on_cpu)
    if _PRIORITIES not in given:
        defaults["--schedule-policy"] = "tenant-fair"
    if on_cpu:
        defaults |= _cpu_flags(given, _page_size(argv, policy))
    chosen = {flag: value for flag, value in defaults.items() if flag not in given}
    pairs = [word for pair in chosen.items() for word in pair]
    switches = ["--enable-metrics", "--enable-cache-report", *tier_switches(policy, given)]
    return [*pairs, *switches, *argv]


def _engine_flags(policy: Policy) -> dict[str, str]:
    return {
        "--page-size": str(policy.engine.page_size),
        "--kv-cache-dtype": policy.engine.kv_cache_dtype,
    }


def _cpu_flags(given: set[str], page_size: int) -> dict[str, str]:
    """Return flags for a machine without accelerator; its memory is shared with everything else."""
    pool = {} if given & _CPU_POOL.keys() else _CPU_POOL
    pages = max(1, _CPU_STEP_TOKENS // page_size)
    return {**_CPU_DEFAULTS, "--chunked-prefill-size": str(pages * page_size), **pool}


def _page_size(argv: Sequence[str], policy: Policy) -> int:
    """Return the page size in force; one that is no number is left to SGLang to refuse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--page-size", type=int, default=policy.engine.page_size)
    try:
        found = parser.parse_known_args(argv)[0].page_size
    except argparse.ArgumentError:
        found = policy.engine.page_size
    return max(1, int(found))


def _flags_of_config(argv: Sequence[str]) -> set[str]:
    """Return the flags that SGLang's configuration file sets; SGLang itself reports a bad file."""
    words = [part for word in argv for part in word.split("=", 1)]
    path = Path(words[words.index("--config") + 1]) if words[-1] != "--config" else None
    if path is None or not path.is_file():
        return set()
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = document if isinstance(document, dict) else {}
    return {"--" + str(name).replace("_", "-") for name in names}

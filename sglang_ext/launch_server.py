"""Start SGLang with a tenant policy: ``python -m sglang_ext.launch_server --tenant-policy FILE``.

Everything that could make the server serve without isolation is checked first, and any doubt is a
refusal with one line. SGLang's processes import this module again, so the top stays cheap.
"""

import gc
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from sglang_ext import active
from sglang_ext.audit_log import AuditLog
from sglang_ext.errors import SglangExtError, UnsupportedError
from sglang_ext.gateway.nodes import read_secret
from sglang_ext.gateway.place import OnlyGateway, Place, live_with, node_place, own_place
from sglang_ext.gateway.plan import needs_engines
from sglang_ext.launch_checks import check_environment, check_modes, check_port, check_sealed
from sglang_ext.launch_flags import given_flags, own_arguments, with_defaults
from sglang_ext.launch_scales import use_scales
from sglang_ext.observe import json_log, recording
from sglang_ext.policy_file import PolicyFile
from sglang_ext.rank_flags import check_ranks, use_router
from sglang_ext.tenancy.auth import Callers, TenantAuth
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tier_flags import check_master_key, check_remote, check_tiers, set_cpu_size
from sglang_ext.warm_up import WarmUp

__all__ = ["main"]

if __name__ in {"__main__", "__mp_main__"}:
    # What a process imports stays. Looking for garbage among it takes a sixth of the time, in each
    # of an engine's three processes; the plugin, which runs after the imports, switches it on.
    gc.disable()

# Kernels that a CPU does not have; each process would print these once for every module.
_QUIET = ("Only CUDA", "Triton is not supported on current platform", "'python -m sglang.launch")


def main(argv: Sequence[str]) -> int:
    """Serve until stopped; return the exit status (2 for a refusal, printed in one line)."""
    own, flags = own_arguments(argv)
    warm_up, place = WarmUp(), own_place()
    if place is not None:
        live_with(place.pid)
    try:
        recording.hand_over(own.usage_db)
        if own.log_json:
            json_log.switch_on()
        file = PolicyFile(own.tenant_policy.absolute())
        policy = _read(file)
        if own.gateway_secret is not None:
            place = _as_node(own.gateway_secret, policy)
        if place is None and (own.nodes is not None or needs_engines(policy, own.engines)):
            return _serve_engines(own, flags, file)
        server_args = _prepare(own, flags, file, warm_up, place)
    except SglangExtError as error:
        print(f"sglang_ext: {own.tenant_policy}: {error}", file=sys.stderr)
        return 2
    return _serve(server_args, warm_up)


def _read(file: PolicyFile) -> Policy:
    """Put the policy of the file in force here, and for every process to come."""
    text = file.read()
    policy = active.hand_over(text)
    file.accept(text)
    check_master_key(policy)
    check_remote(policy)
    return policy


def _as_node(secret: Path, policy: Policy) -> Place:
    """Return the place of an engine whose gateway is elsewhere. Raises SglangExtError."""
    if needs_engines(policy, 1):
        raise UnsupportedError(
            "a node serves no dedicated tenant; leave those out of its policy: the gateway's "
            "machine runs their engines"
        )
    return node_place(read_secret(secret))


def _serve_engines(own: Namespace, flags: Sequence[str], file: PolicyFile) -> int:
    """Serve with a gateway here and each engine in a server of its own."""
    from sglang_ext.gateway.serve import log_to_stderr, serve_engines

    log_to_stderr(as_json=own.log_json)
    gc.enable()
    return serve_engines(own, flags, file)


def _prepare(
    own: Namespace, flags: Sequence[str], file: PolicyFile, warm_up: WarmUp, place: Place | None
) -> Any:
    """Return SGLang's resolved arguments, with hooks applied and the middleware in place."""
    from sglang_ext.patches.cpu_platform import activate
    from sglang_ext.patches.versions import check_version

    check_version()
    check_environment()
    policy = active.policy()
    on_cpu = activate() is not None
    if on_cpu:
        _settle(place)
    demo_model = None if "--model-path" in given_flags(flags) else _demo_model()
    argv = with_defaults(flags, policy, on_cpu=on_cpu, demo_model=demo_model)
    server_args = _resolve(argv, policy, given_flags(flags), on_cpu=on_cpu)
    _extend_app(policy, file, own.audit_log, warm_up, place)
    _record(server_args)
    return server_args


def _settle(place: Place | None) -> None:
    """Make a machine without accelerator ready: its warnings, and whose the cores are."""
    _quiet_warnings()
    if place is not None:
        from sglang_ext.patches.cpu_threads import keep_share

        keep_share(place.index, place.count)


def _demo_model() -> Mapping[str, str]:
    from sglang_ext.demo_model import DEMO_MODEL_NAME, demo_model_path

    path = demo_model_path()
    print(f"sglang_ext: no --model-path given, serving {DEMO_MODEL_NAME}", file=sys.stderr)
    return {"--model-path": str(path), "--served-model-name": DEMO_MODEL_NAME}


def _quiet_warnings() -> None:
    """Silence warnings about kernels that a CPU has not, here and in every child process."""
    rules = [f"ignore:{text}:UserWarning" for text in _QUIET]
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([given, *rules] if given else rules)
    import warnings

    for text in _QUIET:
        warnings.filterwarnings("ignore", message=text, category=UserWarning)


def _resolve(argv: list[str], policy: Policy, given: Set[str], *, on_cpu: bool) -> Any:
    """Let SGLang parse ``argv``, then prove that every request will carry its tenant."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_ext.patches import hooks
    from sglang_ext.tokenizer_metrics import TenantTokenizerMetrics

    hooks.verify()
    server_args = prepare_server_args(argv)
    server_args.stat_loggers = {"tokenizer": TenantTokenizerMetrics}
    set_cpu_size(server_args, policy, given)
    use_router(server_args)
    server_args.resolve_once()
    resolved = resolving_view(server_args)
    check_modes(resolved)
    check_tiers(resolved)
    check_ranks(resolved)
    check_sealed(resolved, policy)
    use_scales(policy, resolved, on_cpu=on_cpu)
    check_port(resolved.host, resolved.port)
    return server_args


def _extend_app(
    policy: Policy,
    file: PolicyFile,
    audit_log: Path | None,
    warm_up: WarmUp,
    place: Place | None,
) -> None:
    """Add our routes to SGLang's application, and put authentication in front of all of them."""
    from sglang.srt.entrypoints.http_server import app

    from sglang_ext import pin_routes, session_routes
    from sglang_ext.http_routes import router
    from sglang_ext.observe import routes

    callers, metrics = Callers(policy), active.request_metrics()
    log = AuditLog(audit_log, metrics.audit_line_lost)
    _let_policy_change(app, file, callers, log, is_engine=place is not None)
    app.include_router(router)
    app.include_router(session_routes.router)
    app.include_router(pin_routes.router)
    app.include_router(routes.router)
    app.add_middleware(
        TenantAuth,
        callers=callers,
        is_own_key=lambda key: warm_up.is_own_key(key) or _is_of_gateway(key, place),
        on_refused=metrics.refused,
    )
    if place is not None:
        # The last that is added is the first that a request meets.
        app.add_middleware(OnlyGateway, place=place, is_own_key=warm_up.is_own_key)


def _is_of_gateway(key: str, place: Place | None) -> bool:
    return place is not None and place.is_secret(key)


def _let_policy_change(
    app: Any, file: PolicyFile, callers: Callers, log: AuditLog, *, is_engine: bool
) -> None:
    """Take another policy over HTTP, or from the file at SIGHUP."""
    from sglang_ext.gateway import policy_steps
    from sglang_ext.leavers import Leavers
    from sglang_ext.live_policy import LivePolicy
    from sglang_ext.patches.admin_channel import ask_schedulers
    from sglang_ext.patches.in_flight import abort_requests, requests_of
    from sglang_ext.policy_routes import mount

    leavers = Leavers(ask_schedulers, requests_of, abort_requests)
    live = LivePolicy(file, callers, log, ask_schedulers, leavers)
    signal.signal(signal.SIGHUP, live.hang_up)
    mount(app, live, log, ask_schedulers)
    if is_engine:
        app.state.policy_steps = policy_steps.PolicySteps(callers, ask_schedulers, leavers)
        app.include_router(policy_steps.router)


def _record(server_args: Any) -> None:
    """Let finished requests be recorded, and what is left be written at the very end."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_ext.patches.shutdown import before_end

    recording.record_requests(resolving_view(server_args).page_size)
    before_end.append(recording.close)


def _serve(server_args: Any, warm_up: WarmUp) -> int:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(server_args, execute_warmup_func=warm_up.run, launch_callback=warm_up.finish)
    except KeyboardInterrupt:
        return 130
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        recording.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A gateway over engines of a few lines, run as a script: ``served.py POLICY PORT``.

The engines are this script too, and so is one of another machine: ``served.py node SECRET PORT``.
``/told`` answers with the policy that an engine was given, and ``FAIL_FILE`` names a file: while it
is there, an engine ends before it serves. ``NODES`` names the file of other machines.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from sglang_ext.gateway import serve
from sglang_ext.gateway.nodes import read_secret
from sglang_ext.gateway.place import OnlyGateway, Place, live_with, node_place, own_place
from sglang_ext.gateway.policy_steps import STEP_ROUTE
from tests.gateway.upstreams import Scope


def engine(policy: Path, port: int) -> None:
    place = own_place()
    assert place is not None
    live_with(place.pid)
    if Path(os.environ.get("FAIL_FILE", "/no/such/file")).exists():
        sys.exit(3)
    serve_as(place, port, lambda: policy.read_text(encoding="utf-8"))


def node(secret: Path, port: int) -> None:
    serve_as(node_place(read_secret(secret)), port, lambda: "tenants: {}")


def serve_as(place: Place, port: int, told: Callable[[], str]) -> None:
    steps: list[dict[str, Any]] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        status, answer = 200, {"engine": place.name, "pid": os.getpid()}
        if scope["path"] == "/told":
            answer = {"told": told(), "steps": steps}
        elif scope["path"] == STEP_ROUTE and scope["method"] == "GET":
            own = {"engine": {"page_size": 16}, "tiers": {"cpu": {"size": "7GB"}}}
            answer = {"run": str(os.getpid()), "version": "1", "own": own}
        elif scope["path"] == STEP_ROUTE:
            steps.append(json.loads(body))
            refused = "refuse-me" in str(steps[-1].get("document"))
            status, answer = (400, {"message": "no room"}) if refused else (200, _answer(steps[-1]))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    guarded = OnlyGateway(app, place, lambda key: False)
    uvicorn.run(guarded, port=port, lifespan="off", log_level="error")


def _answer(step: dict[str, Any]) -> dict[str, Any]:
    return {
        "check": {},
        "apply": {"refused_requests": 1},
        "remove": {
            "aborted_requests": {"x": 1},
            "owners": {"t:x": {"freed": {"hbm": 2}, "left": {"hbm": 0}}},
        },
    }[step["step"]]


def main(policy: Path, port: int) -> int:
    from sglang_ext import active
    from sglang_ext.policy_file import PolicyFile

    def command(spec: Any, told: Path, at: int, *_: Any) -> list[str]:
        return [sys.executable, __file__, "engine", str(told), str(at)]

    serve.engine_command = command
    file = PolicyFile(policy)
    text = file.read()
    active.hand_over(text)
    file.accept(text)
    nodes = os.environ.get("NODES")
    own = Namespace(
        engines=1,
        usage_db=None,
        audit_log=None,
        log_json=False,
        nodes=None if nodes is None else Path(nodes),
    )
    serve.log_to_stderr(as_json=False)
    return serve.serve_engines(own, ["--port", str(port)], file)


if __name__ == "__main__":
    *_, where, number = sys.argv
    if sys.argv[1] in ("engine", "node"):
        {"engine": engine, "node": node}[sys.argv[1]](Path(where), int(number))
    else:
        sys.exit(main(Path(where), int(number)))

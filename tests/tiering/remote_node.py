"""One machine of a cluster test: a shared store that does what its standard input says.

A line in: ``put``, ``get`` or ``answers``, then a first number and how many. A line out: JSON.
"""

import json
import os
import sys

from sglang_ext.tiering.remote_mooncake import MooncakeAddress, MooncakeObjects
from sglang_ext.tiering.remote_store import RemoteStore
from tests.tiering.remotes import make_remote
from tests.tiering.stores import ALICE, get, put, refs_of

__all__: list[str] = []


def main(master: str, admin: str) -> None:
    address = MooncakeAddress(master=master, admin=admin)
    idle = make_remote(MooncakeObjects(address), timeout_s=2.0)
    store = RemoteStore(idle.config, MooncakeObjects(address))
    store.start()
    for line in sys.stdin:
        print(json.dumps(answer(store, *line.split())), flush=True)


def answer(store: RemoteStore, action: str, first: str = "0", count: str = "0") -> object:
    refs = refs_of(ALICE, range(int(first), int(first) + int(count)))
    if action == "put":
        return put(store, refs)
    if action == "get":
        return get(store, refs)
    return store.answers


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Threads that wait for a machine that is gone keep nobody.
    os._exit(0)

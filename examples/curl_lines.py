"""Print a curl line for each tenant of a policy whose key is its public demo key."""

import sys
from pathlib import Path

from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.loader import load_policy

_BODY = (
    '{"model": "demo", "max_tokens": 32, "temperature": 0, '
    '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)


def main(policy_path: str, port: str) -> None:
    """Print the lines; a tenant with a key of its own gets a placeholder."""
    policy = load_policy(Path(policy_path))
    print(f"The server answers at http://127.0.0.1:{port} in about 20 seconds. Try:")
    for name, tenant in policy.tenants.items():
        if tenant.api_keys:
            print(_curl(name, {key.digest for key in tenant.api_keys}, port), flush=True)


def _curl(name: str, digests: set[str], port: str) -> str:
    key = f"demo-key-{name}" if digest(f"demo-key-{name}") in digests else f"<key of {name}>"
    return (
        f"\n# {name}\ncurl http://127.0.0.1:{port}/v1/chat/completions \\\n"
        f"  -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\\n"
        f"  -d '{_BODY}'"
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])

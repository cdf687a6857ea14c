"""From the policy's public system prompts to the token runs that begin a request with them.

What every request with such a system prompt has in common depends on the model's chat template, so
the template is asked: two conversations that differ in the user's first word agree that far.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.tenancy.policy import Policy

__all__ = ["public_prefixes", "public_run"]

_PROBES = ("apple", "7")


def public_prefixes(policy: Policy, ctx: Any) -> PublicPrefixes:
    """Return the public prefixes of a cache that SGLang's TreeCacheBuildContext describes.

    Reads the tokenizer once more where the policy has public prefixes, about half a second.
    """
    page_size = ctx.params.page_size
    if not policy.public_prefixes:
        return PublicPrefixes((), page_size)
    tokenizer = _tokenizer()
    runs = [public_run(tokenizer, prefix.system) for prefix in policy.public_prefixes]
    return PublicPrefixes(runs, page_size)


def public_run(tokenizer: Any, system: str) -> list[int]:
    """Return the tokens with which every conversation under this system prompt begins."""
    first, second = (_conversation(tokenizer, system, probe) for probe in _PROBES)
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [token for token, _ in pairs]


def _conversation(tokenizer: Any, system: str, user: str) -> Sequence[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def _tokenizer() -> Any:
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    serving, model = get_serving(), get_model()
    return get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        tokenizer_revision=model.revision,
    )

"""Keeps secrets out of everything that is written: the journal, and so every tracker's run page.

A secret is known by its key, or by the shape of its value. Keys of tokenizers and of counts
(``pad_token_id``, ``max_tokens``) are no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"

# The last words of a key that say that its value is a secret.
_SECRET_WORDS = frozenset(
    {"secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential", "credentials"}
)
_SECRET_KEYS = frozenset(
    {"api", "access", "account", "auth", "private", "secret", "ssh", "signing", "wandb"}
)
_SECRET_TOKENS = frozenset(
    {"access", "api", "auth", "bearer", "github", "gitlab", "hf", "hub", "id", "jwt", "oauth"}
    | {"refresh", "secret", "session", "slack", "user", "wandb"}
)
# Values of known shapes, wherever they are.
_SECRET_VALUES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\bsk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"  # GitHub
    r"|\bglpat-[\w-]{20,}"  # GitLab
    r"|\bxox[abprs]-[\w-]{10,}"  # Slack
    r"|\bAIza[\w-]{35}"  # Google
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):([^\s@]+)@")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def mask_secrets(config: Any, more_keys: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Return plain data with every secret replaced by ``***``, and the paths of the masked ones.

    ``more_keys`` are keys that are secret too, whatever their form.
    """
    masked: list[str] = []
    secret_keys = frozenset(more_keys)

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {key: entry(str(key), item, path) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, str):
            text = mask_text(value)
            if text != value:
                masked.append(path)
            return text
        return value

    def entry(key: str, value: Any, path: str) -> Any:
        here = f"{path}.{key}" if path else key
        if key in secret_keys or (_is_secret_key(key) and not _is_empty(value)):
            masked.append(here)
            return MASK
        return walk(value, here)

    return walk(config, ""), masked


def mask_text(text: str) -> str:
    """Return a text with every secret of a known shape, and passwords in URLs, replaced."""
    return _URL_PASSWORD.sub(rf"\1:{MASK}@", _SECRET_VALUES.sub(MASK, text))


def mask_command(arguments: Iterable[str], more_keys: Iterable[str] = ()) -> list[str]:
    """Return a command line with the secrets in it replaced.

    A secret is ``--hf-token X``, ``--hf_token=X``, ``hf_token=X``, or known by its shape.
    """
    secret_keys = frozenset(more_keys)

    def is_secret(option: str) -> bool:
        key = option.lstrip("-+")
        return key.rpartition(".")[2] in secret_keys or _is_secret_key(key)

    masked = []
    is_value = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if is_value:
            masked.append(MASK)
        elif equals and value and is_secret(option):
            masked.append(f"{option}={MASK}")
        else:
            masked.append(mask_text(argument))
        is_value = argument.startswith("--") and not equals and is_secret(argument)
    return masked


def _is_secret_key(key: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(key)]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else None
    if last in ("key", "keys", "apikey"):
        return last == "apikey" or before in _SECRET_KEYS
    if last in ("token", "tokens"):
        return before is None or before in _SECRET_TOKENS
    return last in _SECRET_WORDS


def _is_empty(value: Any) -> bool:
    """Say whether a value tells nothing: that there is no secret, or how it is to be used."""
    return value is None or isinstance(value, bool) or value in ("", {}, [])

"""JSON that says who it is: canonical text (sorted keys, no blanks) that carries its own sha256.

Records, the run file, lock files and checkpoint markers are such *sealed* objects, so a flipped byte
in any of them is found without another file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from elastic.base.errors import IntegrityError

_SEAL = "sha256"


def seal(fields: Mapping[str, Any], *, where: str) -> tuple[bytes, str]:
    """The bytes of the sealed object, and its hash. Raises ValueError on what JSON cannot say exactly."""
    if _SEAL in fields:
        raise ValueError(f"{where}: the key {_SEAL!r} is taken by the seal")
    sha256 = _hash(fields, where)
    return _text({**fields, _SEAL: sha256}, where), sha256


def unseal(data: bytes, *, where: str) -> dict[str, Any]:
    """The fields of a sealed object, its hash among them; raises IntegrityError if any byte differs."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise IntegrityError("not JSON", where=where, saw=f"{data[:40]!r}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get(_SEAL), str):
        raise IntegrityError("not a sealed JSON object", where=where, saw=f"{data[:40]!r}")
    expected = fields.pop(_SEAL)
    try:
        seen = _hash(fields, where)
        whole = _text({**fields, _SEAL: expected}, where)
    except ValueError as error:  # NaN, or half of a surrogate pair
        raise IntegrityError("not canonical JSON", where=where, saw=str(error)) from error
    if seen != expected or whole != data:
        raise IntegrityError(
            "the content is not what its hash says",
            where=where,
            saw=f"sha256 {seen[:16]}..., expected {expected[:16]}...",
        )
    return {**fields, _SEAL: expected}


def _text(fields: Mapping[str, Any], where: str) -> bytes:
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: cannot be written as JSON: {error}") from error


def _hash(fields: Mapping[str, Any], where: str) -> str:
    return hashlib.sha256(_text(fields, where)).hexdigest()

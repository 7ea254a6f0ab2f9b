"""Which parameters are synchronised together. For now one fragment holds them all."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.base.errors import ConfigError


def split(names: Sequence[str], fragments: int) -> list[list[str]]:
    """Split parameter names, in order of definition, into `fragments` lists, each name in one.

    Raises ConfigError for more than one fragment, which is not supported yet.
    """
    if fragments != 1:
        raise ConfigError([f"fragments: {fragments} asked for; only 1 is supported, all parameters together"])
    return [list(names)]

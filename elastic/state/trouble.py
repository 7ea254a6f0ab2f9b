"""Storage errors sorted into kinds: may pass by itself, can never work, or somebody else's business."""

from __future__ import annotations

import asyncio
import errno
import re

# Client libraries of buckets raise errors of their own besides OSError.
_REMOTE_LIBRARIES = {"aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "requests", "urllib3"}
_NO_LINKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_REFUSALS = _NO_LINKS | {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}


def may_pass(error: BaseException) -> bool:
    """True if trying again can help: a lost connection, a rate limit, a full disk, a stale mount."""
    if isinstance(error, FileNotFoundError | FileExistsError) or is_refusal(error):
        return False
    kinds = (OSError, TimeoutError, asyncio.TimeoutError)  # three kinds before Python 3.11
    return isinstance(error, kinds) or _library(error) in _REMOTE_LIBRARIES


def is_refusal(error: BaseException) -> bool:
    """True if trying again cannot help: no permission, no credentials, not a folder, read-only."""
    if isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError):
        return True
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return True
    if isinstance(error, OSError) and error.errno is None and str(error).startswith("Forbidden"):
        return True  # gcsfs
    if _library(error) not in _REMOTE_LIBRARIES:
        return False
    named = re.search("Credential|Auth|RefreshError", type(error).__name__) is not None
    return named or getattr(error, "code", None) in (401, 403)


def fix_for(error: BaseException) -> str:
    """What the user can do about a refusal."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EROFS:
        return "the file system is read-only; choose another run_folder"
    if number in (errno.ENOTDIR, errno.EISDIR) or isinstance(error, NotADirectoryError | IsADirectoryError):
        return "a file is where a folder should be, or the other way round; choose another run_folder"
    if number in _NO_LINKS:
        return "this file system has no hard links; use a local or NFS path, or the bucket's own URL (s3://, gs://)"
    if number == errno.ENAMETOOLONG:
        return "choose a shorter run_folder"
    return "give this user write access to the run folder (for a bucket: credentials on every node)"


def _library(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]

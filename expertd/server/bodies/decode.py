"""From a request's body to its struct: size and type are checked, unknown fields are ignored and logged once each."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import TypeVar

import msgspec
from starlette.requests import Request

from expertd.errors import RequestError

logger = logging.getLogger("expertd.server")
T = TypeVar("T", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MAX_REMEMBERED = 1000
_unknown: set[tuple[str, str]] = set()


@lru_cache(maxsize=64)
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`. Raises RequestError that names the JSON path."""
    try:
        value: T = _decoder(kind).decode(body)
        given = _keys.decode(body)
    except msgspec.ValidationError as error:
        path = _PATH.search(str(error))
        where = f" in `{path[1]}`" if path and path[1] else ""
        raise RequestError(
            f"{_PATH.sub('', str(error))}{where}", param=path[1].split("[")[0].split(".")[0] if path else ""
        ) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", hint="send application/json in UTF-8") from error
    _tell_unknown(kind, given)
    return value


async def read(request: Request, kind: type[T]) -> T:
    """The request's body as a `kind`. Raises RequestError, or what the body limits raise."""
    return decode(await request.body(), kind)


def _tell_unknown(kind: type[msgspec.Struct], given: dict[str, msgspec.Raw]) -> None:
    known = kind.__struct_encode_fields__
    for name in given.keys() - set(known):
        if (kind.__name__, name) not in _unknown and len(_unknown) < _MAX_REMEMBERED:
            _unknown.add((kind.__name__, name))
            logger.info("field %r of %s is not known here and is ignored", name[:100], kind.__name__)

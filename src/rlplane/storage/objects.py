"""How Python objects in columns and tags travel: msgpack, checked, and pickle only when allowed.

msgspec would happily turn a set, a dataclass or a naive datetime into something that comes back
different. What may travel is therefore decided here, by type, before anything is encoded: None,
bool, int, float, str, bytes, list (a tuple becomes one), dict with string keys, and numpy arrays.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec.msgpack import Encoder, Ext

from rlplane.errors import InvalidRequestError, UnsupportedValueError

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_WALKED = _ATOMS | {list, tuple, dict, np.ndarray}
_ARRAY, _PICKLE = 1, 2
_encoder = Encoder()
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


class Keeper(Protocol):
    """Keeps values of rows apart from them."""

    def keep(self, value: Any) -> Any:
        """What stands for a value in its row until that is encoded; None if it is not kept."""

    def encoder(self) -> Encoder:
        """Encodes rows whose values were all offered."""


def encode_objects(
    values: Sequence[Any], *, field: str, allow_pickle: bool = False, bulk: Keeper | None = None
) -> list[bytes]:
    """Encode one object per row; ``field`` is named in the error if one may not travel.

    ``bulk`` is offered arrays, and what is not plain data.
    """
    try:
        encoder = _encoder
        if not set(map(type, values)) <= _ATOMS:
            values = [_sealed(value, f"field {field!r}", allow_pickle, bulk) for value in values]
            encoder = _encoder if bulk is None else bulk.encoder()
        return [encoder.encode(value) for value in values]
    except RecursionError as error:
        raise UnsupportedValueError(f"field {field!r} holds a value that is nested too deeply") from error
    except (OverflowError, UnicodeEncodeError) as error:
        raise UnsupportedValueError(f"field {field!r} holds a value that cannot travel: {error}") from error


def decode_object(data: bytes | memoryview, *, allow_pickle: bool = False) -> Any:
    """Decode what :func:`encode_objects` made of one object."""
    return (_pickle_decoder if allow_pickle else _decoder).decode(data)


def open_ext(code: int, data: memoryview, *, allow_pickle: bool) -> Any:
    """Decode what stands for an array or a pickled object in msgpack."""
    return (_open_ext_with_pickle if allow_pickle else _open_ext)(code, data)


def plain_tags(tags: Sequence[dict[str, Any]], *, allow_pickle: bool = False) -> list[dict[str, Any]]:
    """Check ``tags`` and return them in their sealed form. What needs no sealing is not copied.

    Arrays (and pickled objects) stay sealed, as msgpack extensions, so that the control service can keep
    and compare tags without ever unpickling anything. :func:`open_tags` is the inverse.
    """
    if set(map(type, tags)) - {dict}:
        bad = next(tag for tag in tags if type(tag) is not dict)
        raise InvalidRequestError(f"a tag is a dict per sample, not {type(bad).__name__}: {bad!r:.80}")
    if set(map(type, chain.from_iterable(tags))) - {str}:
        wrong = next(key for key in chain.from_iterable(tags) if type(key) is not str)
        raise InvalidRequestError(f"a tag's name is a string, not {wrong!r}")
    if _are_atoms(tags):
        try:
            _encoder.encode(tags)  # refuses what is of the right type and cannot travel all the same
            return list(tags)
        except (OverflowError, UnicodeEncodeError):
            pass  # the way below finds out which one it is
    return [
        {_tag_name(name): _sealed_tag(name, value, allow_pickle) for name, value in tag.items()}
        for tag in tags
    ]


def open_tags(tags: Iterable[dict[str, Any]], *, allow_pickle: bool = False) -> list[dict[str, Any]]:
    """Turn sealed tags into the caller's own."""
    sealed = list(tags)
    if _are_atoms(sealed):
        return list(map(dict.copy, sealed))
    hook = _open_ext_with_pickle if allow_pickle else _open_ext
    return [{name: _opened(value, hook) for name, value in tag.items()} for tag in sealed]


def _tag_name(name: str) -> str:
    if not _is_encodable(name):
        raise InvalidRequestError(f"a tag's name is valid Unicode, not {name!r}")
    return name


def _sealed_tag(name: str, value: Any, allow_pickle: bool) -> Any:
    try:
        return _sealed(_scalar(value), f"tag {name!r}", allow_pickle)
    except RecursionError as error:
        raise UnsupportedValueError(f"tag {name!r} holds a value that is nested too deeply") from error


def _sealed(value: Any, where: str, allow_pickle: bool, bulk: Keeper | None = None) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        if kind is int and not _INT64_MIN <= value <= _UINT64_MAX:
            raise UnsupportedValueError(f"{where} holds {value}, which does not fit into 64 bits")
        if kind is str and not _is_encodable(value):
            raise UnsupportedValueError(f"{where} holds {value!r:.80}, which is not valid Unicode")
        return value
    if kind is list or kind is tuple:
        return [_sealed(item, where, allow_pickle, bulk) for item in value]
    if kind is dict:
        sealed = {}
        for key, item in value.items():
            if type(key) is not str or not (key.isascii() or _is_encodable(key)):
                break
            if item is not None:
                # A batch has thousands of tensors: a call less for each of them is a measurable part of it.
                kept = None if bulk is None or type(item) in _WALKED else bulk.keep(item)
                item = _sealed(item, where, allow_pickle, bulk) if kept is None else kept
            sealed[key] = item
        else:
            return sealed
    elif bulk is not None and kind is not np.ndarray and (kept := bulk.keep(value)) is not None:
        return kept
    elif isinstance(value, np.generic) and value.dtype.kind in "biufSU" and type(value.item()) in _ATOMS:
        # Not dates, which would come back as numbers, nor long doubles, which Python does not have.
        return _sealed(value.item(), where, allow_pickle)
    elif kind is np.ndarray and value.dtype.kind in "biufcSU":
        if bulk is not None and (kept := bulk.keep(value)) is not None:
            return kept
        # dtype.str says the byte order too, so that big-endian arrays come back right.
        header = _encoder.encode((value.dtype.str, value.shape))
        return Ext(_ARRAY, len(header).to_bytes(4, "little") + header + np.ascontiguousarray(value).tobytes())
    if allow_pickle:
        try:
            return Ext(_PICKLE, pickle.dumps(value, protocol=5))
        except Exception as error:
            raise UnsupportedValueError(f"{where} holds an object that cannot be pickled: {error}") from error
    if kind is dict:
        detail = "a dict with keys that are not strings of valid Unicode"
    elif kind is np.ndarray:
        detail = f"a numpy array of dtype {value.dtype}"
    else:
        detail = f"a {kind.__module__}.{kind.__qualname__}"
    arrays = "numpy arrays of numbers or text" if bulk is None else "tensors, numpy arrays of numbers or text"
    raise UnsupportedValueError(
        f"{where} holds {detail}; objects may be None, bool, int, float, str, bytes, list, dict with string "
        f"keys and {arrays}, or, with allow_pickle: true in the config, what pickles"
    )


def _is_encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _scalar(value: Any) -> Any:
    """A 0-d array or tensor in a tag stands for its value, so that conditions can compare it."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value[()]
    if isinstance(value, np.generic) or getattr(value, "ndim", None) != 0:
        return value
    return value.item() if callable(getattr(value, "item", None)) else value


def _are_atoms(tags: Sequence[dict[str, Any]]) -> bool:
    return set(map(type, chain.from_iterable(map(dict.values, tags)))) <= _ATOMS


def _open_array(data: memoryview) -> np.ndarray[Any, Any]:
    size = int.from_bytes(data[:4], "little")
    dtype, shape = msgspec.msgpack.decode(data[4 : 4 + size], type=tuple[str, tuple[int, ...]])
    return np.frombuffer(data[4 + size :], dtype=np.dtype(dtype)).reshape(shape).copy()


def _open_ext(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        return _open_array(data)
    if code == _PICKLE:
        raise UnsupportedValueError("the value was pickled, and the config does not say allow_pickle: true")
    raise UnsupportedValueError(f"msgpack extension {code} is not one of ours")


def _open_ext_with_pickle(code: int, data: memoryview) -> Any:
    return pickle.loads(data) if code == _PICKLE else _open_ext(code, data)


def _opened(value: Any, hook: Any) -> Any:
    if type(value) is Ext:
        return hook(value.code, memoryview(value.data))
    if type(value) is dict:
        return {key: _opened(item, hook) for key, item in value.items()}
    if type(value) is list:
        return [_opened(item, hook) for item in value]
    return value


_decoder = msgspec.msgpack.Decoder(ext_hook=_open_ext)
_pickle_decoder = msgspec.msgpack.Decoder(ext_hook=_open_ext_with_pickle)

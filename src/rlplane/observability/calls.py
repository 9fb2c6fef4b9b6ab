"""What is recorded of each operation of a client, the same for the plain client and the asyncio one.

A client's method is made from that of the contract: it hands its arguments on as they are, and a function
with the same arguments says what to record of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rlplane.observability.operation import Advanced, Claimed, Cleared, Effect, Reset, as_ids, put_effect

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.batch_meta import KVBatchMeta


class Call(msgspec.Struct, gc=False):
    """An operation as it begins. ``effect`` says from the result (None: it failed) what it did to the
    samples; with ``if_tracked`` that is of interest only where samples are followed one by one."""

    op: str
    partition_id: str
    n_keys: int = 0
    task: str | None = None
    effect: Callable[[Any], Effect | None] | None = None
    if_tracked: bool = False


class ContractMethod:
    """A method of the contract: its name, and what describes a call with its arguments."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.name = method.__name__
        self.describe = _CALLS[self.name]
        parameters = inspect.signature(method).parameters.values()
        self._optional = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    def handed_on(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Those that say something: an engine written for the contract without some is not handed one that
        nobody asked for."""
        return {name: value for name, value in arguments.items() if not self._is_default(name, value)}

    def _is_default(self, name: str, value: Any) -> bool:
        # Only numbers are compared: what is no argument of that kind is for the engine to refuse.
        default = self._optional.get(name, inspect.Parameter.empty)
        return value is default or (isinstance(value, (int, float)) and bool(value == default))


def _on_partition(op: str) -> Callable[..., Call]:
    return lambda partition_id, *_, **__: Call(op, partition_id)


def _claim(partition_id: str, task_name: str, *_: Any, **__: Any) -> Call:
    return Call("claim_meta", partition_id, task=task_name, effect=_claimed, if_tracked=True)


def _claimed(meta: KVBatchMeta | None) -> Effect | None:
    return None if meta is None else Claimed(list(meta.sample_ids), [dict(tag) for tag in meta.tags or ()])


def _get_data(meta: KVBatchMeta, *_: Any, **__: Any) -> Call:
    # What is no meta is for the engine to refuse.
    partition_id, keys = getattr(meta, "partition_id", ""), getattr(meta, "size", 0)
    return Call("get_data", partition_id, keys, getattr(meta, "task_name", None))


def _put(
    sample_ids: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    **_: Any,
) -> Call:
    keys = len(as_ids(sample_ids))
    return Call("put", partition_id, keys, effect=put_effect(sample_ids, fields, tags))


def _append(
    sample_ids: list[str],
    partition_id: str,
    fields: TensorDict,
    tags: list[dict[str, Any]] | None = None,
    **_: Any,
) -> Call:
    keys = len(as_ids(sample_ids))
    return Call("append", partition_id, keys, effect=put_effect(sample_ids, fields, tags, appends=True))


def _get(sample_ids: list[str], partition_id: str, *_: Any, **__: Any) -> Call:
    return Call("get", partition_id, len(as_ids(sample_ids)))


def _clear(sample_ids: list[str] | None, partition_id: str) -> Call:
    ids = None if sample_ids is None else as_ids(sample_ids)
    return Call("clear", partition_id, len(ids or ()), effect=lambda _: Cleared(ids))


def _advance(partition_id: str, version: int) -> Call:
    return Call("advance_version", partition_id, effect=lambda _: Advanced(version))


def _on_claims(op: str) -> Callable[..., Call]:
    return lambda meta: Call(op, meta.partition_id, meta.size)


_CALLS: Mapping[str, Callable[..., Call]] = {
    "register_partition": _on_partition("register"),
    "claim_meta": _claim,
    "get_data": _get_data,
    "put_samples": _put,
    "get_samples": _get,
    "clear_samples": _clear,
    "append_samples": _append,
    "advance_version": _advance,
    "should_abort": lambda sample_ids, partition_id: Call("should_abort", partition_id),
    "save_checkpoint": lambda *_, **__: Call("save_checkpoint", ""),
    # The plane's content is replaced, so nothing of what this client put is there any more.
    "load_checkpoint": lambda *_, **__: Call("load_checkpoint", "", effect=lambda _: Reset()),
    **{name: _on_claims(name) for name in ("finish_claims", "unclaim")},
    **{
        name: _on_partition(name)
        for name in (
            "check_consumption_status",
            "close_group",
            "count",
            "drop_partition",
            "evicted_meta",
            "finish_partition",
            "list_sample_ids",
            "partition_status",
            "peek_meta",
        )
    },
}
for _name, _describe in _CALLS.items():
    _describe.__qualname__ = _name  # Under which it says which argument is missing.

"""The rules of the contract that are the same in every adapter: what a request may say.

Each function checks one kind of argument and raises an error that names the wrong value and what
would be right, before anything has been changed.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rlplane.control.policies import FlowPolicy
from rlplane.errors import CapacityError, InvalidRequestError, UnknownFieldError

Condition = Callable[[dict[str, Any]], bool]


class PartitionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a registration declares. New fields come last, with a default: it is on the wire and on disk."""

    partition_id: str
    fields: list[str]
    num_samples: int
    tasks: list[str]
    group_size: int | None = None
    enums: dict[str, list[str]] = {}
    flow: FlowPolicy | None = None
    # The fields that a task writes; it is finished with a sample when all of them are there.
    produces: dict[str, list[str]] = {}

    def extended(self, fields: Sequence[str], tasks: Sequence[str]) -> PartitionSpec:
        """The same with these fields and tasks beside its own."""
        return msgspec.structs.replace(
            self,
            fields=list(dict.fromkeys([*self.fields, *fields])),
            tasks=list(dict.fromkeys([*self.tasks, *tasks])),
        )

    @classmethod
    def checked(
        cls,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        flow: FlowPolicy | Mapping[str, Any] | None = None,
        produces: Mapping[str, Sequence[str]] | None = None,
    ) -> PartitionSpec:
        """Build a spec from the arguments of ``register_partition``, or say what is wrong with them."""
        if not isinstance(partition_id, str) or not partition_id:
            raise InvalidRequestError(f"partition_id must be a non-empty string, not {partition_id!r}")
        if _not_unicode([partition_id]):
            raise InvalidRequestError(f"partition_id is not valid Unicode: {partition_id!r}")
        field_names = check_names("fields", fields)
        tasks = check_names("consumer_tasks", consumer_tasks)
        if type(num_samples) is not int or num_samples < 0:
            raise InvalidRequestError(f"num_samples must be an integer of at least 0, not {num_samples!r}")
        if grpo_group_size is not None and (type(grpo_group_size) is not int or grpo_group_size < 1):
            raise InvalidRequestError(
                f"grpo_group_size must be an integer of at least 1, or None, not {grpo_group_size!r}"
            )
        vocabularies = {}
        if not isinstance(enums or {}, Mapping):
            raise InvalidRequestError(f"enums must map fields to lists of strings, not {enums!r:.80}")
        for name, values in (enums or {}).items():
            if name not in field_names:
                raise InvalidRequestError(
                    f"enums names {name!r}, which is not one of the fields {field_names}"
                )
            vocabularies[name] = check_names(f"enums[{name!r}]", values, empty_name=True)
        if not isinstance(produces or {}, Mapping):
            raise InvalidRequestError(f"produces must map tasks to lists of fields, not {produces!r:.80}")
        produced = {}
        for task, names in (produces or {}).items():
            if task not in tasks:
                raise InvalidRequestError(f"produces names {task!r}, which is not one of the tasks {tasks}")
            produced[task] = check_names(f"produces[{task!r}]", names)
            for name in produced[task]:
                if name not in field_names:
                    raise InvalidRequestError(
                        f"produces[{task!r}] names {name!r}, which is not one of the fields {field_names}"
                    )
        return cls(
            partition_id=partition_id,
            fields=field_names,
            num_samples=num_samples,
            tasks=tasks,
            group_size=grpo_group_size,
            enums=vocabularies,
            flow=FlowPolicy.checked(flow, tasks),
            produces=produced,
        )


def check_names(what: str, names: Sequence[str], *, empty_name: bool = False) -> list[str]:
    """A list of distinct strings."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidRequestError(f"{what} must be a list of strings, not {names!r:.80}")
    for name in names:
        if not isinstance(name, str) or not (name or empty_name):
            kind = "strings" if empty_name else "non-empty strings"
            raise InvalidRequestError(f"{what} must hold {kind}, not {name!r}")
    if len(set(names)) != len(names):
        raise InvalidRequestError(f"{what} names {_first_duplicate(names)!r} twice")
    if bad := _not_unicode(names):
        raise InvalidRequestError(f"{what} holds {bad!r}, which is not valid Unicode")
    return list(names)


def check_ids(sample_ids: Sequence[str], *, distinct: bool = True) -> list[str]:
    """A list of non-empty strings, each once unless ``distinct`` is False."""
    if isinstance(sample_ids, str) or not isinstance(sample_ids, Sequence):
        hint = ""
        if isinstance(sample_ids, str):
            hint = "; the ids come first and the partition second: (sample_ids, partition_id, ...)"
        raise InvalidRequestError(f"sample_ids must be a list of strings, not {sample_ids!r:.80}{hint}")
    ids = list(sample_ids)
    if set(map(type, ids)) - {str} or "" in ids:
        bad = next(sample_id for sample_id in ids if type(sample_id) is not str or not sample_id)
        raise InvalidRequestError(f"a sample id is a non-empty string, not {bad!r}")
    if distinct and len(set(ids)) != len(ids):
        raise InvalidRequestError(f"sample id {_first_duplicate(ids)!r} is given twice in one call")
    if wrong := _not_unicode(ids):
        raise InvalidRequestError(f"sample id {wrong!r} is not valid Unicode")
    return ids


def check_capacity(new: int, capacity: int) -> None:
    """Refuse a put that will never fit."""
    if new > capacity:
        raise CapacityError(f"a put of {new} new samples can never fit into storage_capacity {capacity}")


def check_claim(
    spec: PartitionSpec,
    batch_size: int,
    known_fields: Collection[str],
    fields: list[str],
    max_tokens: int | None = None,
) -> None:
    """The numbers of a claim, and its fields against those that are declared or were ever written."""
    if type(batch_size) is not int or batch_size < 1:
        raise InvalidRequestError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    if spec.group_size and batch_size % spec.group_size:
        raise InvalidRequestError(
            f"batch_size {batch_size} must be a multiple of grpo_group_size {spec.group_size} "
            f"of partition {spec.partition_id!r}: only whole groups are handed out"
        )
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise InvalidRequestError(f"max_tokens must be an integer of at least 1, not {max_tokens!r}")
    for name in fields:
        if name not in known_fields:
            raise UnknownFieldError(
                f"partition {spec.partition_id!r} has no field {name!r}; it has {sorted(known_fields)}"
            )


def check_timeout(timeout_s: float) -> float:
    """A number of seconds, not negative; infinity is one."""
    if not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise InvalidRequestError(f"timeout_s must be a number of seconds of at least 0, not {timeout_s!r}")
    return timeout_s


def group_of(sample_id: str, tag: dict[str, Any] | None) -> str:
    """The group of a sample: its tag ``group``, else its id up to the last ``_g<number>``."""
    if tag is not None:
        group = tag.get("group")
        if group is not None:
            if type(group) not in (str, int):
                raise InvalidRequestError(
                    f"tag 'group' of sample {sample_id!r} must be a string or an integer, not {group!r}"
                )
            return group_name(group)
    group, mark, number = sample_id.rpartition("_g")
    if not mark or not number.isdecimal():
        raise InvalidRequestError(
            f"sample {sample_id!r} is in a partition with grpo_group_size and belongs to no group: "
            "give it the tag 'group', or an id that ends in _g<number>"
        )
    return f"str:{group}"


def group_name(group: str | int) -> str:
    """A group as the state knows it: the text "1" and the number 1 are two groups."""
    return f"{type(group).__name__}:{group}"


def own_group_size(sample_id: str, tag: dict[str, Any]) -> int | None:
    """The size that the first write of a sample declares for its group."""
    size = tag.get("group_size")
    if size is not None and (type(size) is not int or size < 1):
        raise InvalidRequestError(
            f"tag 'group_size' of sample {sample_id!r} must be an integer of at least 1, not {size!r}"
        )
    return size


# Values of these types are equal exactly if a set takes them for equal, but for NaN, which equals nothing.
_HASHED = frozenset({str, int, float, bool, bytes, type(None)})


def _member_test(options: Collection[Any]) -> Callable[[Any, Any], bool]:
    """A test for membership that costs the same however many options there are."""
    hashed = {option for option in options if type(option) in _HASHED and option == option}
    others = [option for option in options if type(option) not in _HASHED]

    def is_in(value: Any, operand: Any) -> bool:
        if type(value) in _HASHED:
            return value in hashed or any(bool(value == option) for option in others)
        return any(bool(value == option) for option in operand)

    return is_in


def _test_for(name: str, operand: Any) -> Callable[[Any, Any], bool]:
    if name in ("in", "not in"):
        is_in = _member_test(operand)
        return is_in if name == "in" else lambda value, operand: not is_in(value, operand)
    return _COMPARISONS[name]


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATORS = (*_COMPARISONS, "in", "not in")


def compile_where(where: Mapping[str, Any] | None) -> Condition | None:
    """Turn ``where`` into a function of a sample's tags; None when there is no condition."""
    if where is None:
        return None
    if not isinstance(where, Mapping):
        raise InvalidRequestError(f"where must map tags to conditions, not {where!r:.80}")
    if not where:
        return None
    tests: list[tuple[str, Callable[[Any, Any], bool], Any]] = []
    for tag, condition in where.items():
        if not isinstance(tag, str):
            raise InvalidRequestError(f"where names the tag {tag!r}; a tag's name is a string")
        if not isinstance(condition, Mapping):
            tests.append((tag, operator.eq, condition))
            continue
        if not condition:
            tests.append((tag, lambda value, operand: True, None))  # the tag must be there, that is all
        for name, operand in condition.items():
            if name not in _OPERATORS:
                raise InvalidRequestError(
                    f"where[{tag!r}] has the operator {name!r}; known ones are {', '.join(_OPERATORS)}"
                )
            if name in ("in", "not in") and not isinstance(operand, (list, tuple, set, frozenset)):
                raise InvalidRequestError(f"where[{tag!r}][{name!r}] needs a list, not {operand!r:.80}")
            tests.append((tag, _test_for(name, operand), operand))

    def matches(tags: dict[str, Any]) -> bool:
        try:
            for tag, test, operand in tests:
                if not test(tags[tag], operand):
                    return False
        except (KeyError, TypeError, ValueError):
            return False  # the tag is not there, or cannot be compared
        return True

    return matches


def why_nothing_matches(where: Mapping[str, Any], tags: Iterable[Mapping[str, Any]]) -> str:
    """What is wrong with a condition that none of these samples fulfils, as far as that can be said."""
    found = []
    samples = list(tags)
    for tag, condition in where.items():
        values = [sample[tag] for sample in samples if tag in sample]
        if samples and not values:
            names = sorted({name for sample in samples for name in sample})
            found.append(f"no sample has a tag {tag!r}; they have {names}")
            continue
        wanted = condition.values() if isinstance(condition, Mapping) else [condition]
        for operand in wanted:
            if isinstance(operand, str) and values and all(_is_number(value) for value in values):
                found.append(f"the tag {tag!r} is a number, and is compared with the text {operand!r}")
            elif _is_number(operand) and values and all(isinstance(value, str) for value in values):
                found.append(f"the tag {tag!r} is text, and is compared with the number {operand!r}")
    return "; ".join(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_unicode(texts: Sequence[str]) -> str | None:
    """The first text with half of a surrogate pair in it, which neither the wire nor a file can have."""
    try:
        "".join(texts).encode()
        return None
    except UnicodeEncodeError:
        return next(text for text in texts if any("\ud800" <= letter <= "\udfff" for letter in text))


def _first_duplicate(names: Sequence[str]) -> str:
    counts = Counter(names)
    return next(name for name in names if counts[name] > 1)

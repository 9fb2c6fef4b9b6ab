"""Sinks: where a client's measurements go beside the aggregator.

A sink is anything with :meth:`Sink.write` and :meth:`Sink.close`. It is called on a thread of its own, with
batches of records, and may fail or be slow without harm (see :mod:`rlplane.sinks.isolated`). A sink that is
configured and cannot start is an error at start.

``isolated``     the thread and the buffer that a sink, or a callback, gets
``jsonl``        every record as a line of JSON
``log``          one line per operation, through Python's logging (the sink ``logging``)
``otel``         OpenTelemetry metrics and spans
``tensorboard``  scalars in an event file
``trace``        a Chrome trace of every operation
``wandb``        curves of a Weights & Biases run
``prometheus``   no sink: the aggregator's latest snapshot as Prometheus metrics
``metrics_http`` the server of those

Other packages add theirs through the entry-point group ``rlplane.sinks``, whose objects are called with the
options of the config and return a sink. What is in a record is described in ``docs/observability.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rlplane.errors import ConfigError, MissingExtraError

__all__ = [
    "SINK_GROUP",
    "Record",
    "Sink",
    "SinkSpec",
    "build_sink",
    "curves",
    "describe_spec",
    "found_nothing",
    "sink_names",
]

SINK_GROUP = "rlplane.sinks"

Record: TypeAlias = Mapping[str, Any]
"""One measurement. ``record["kind"]`` is ``session``, ``op``, ``scalars``, ``step``, ``log`` or
``transfers``."""


def found_nothing(record: Record) -> bool:
    """Whether it is a claim that ran out of time: the plane was empty, and nothing has failed."""
    return bool(record["status"] == "timeout" and record["op"] == "claim_meta")


def curves(record: Record) -> dict[str, float]:
    """What of a record can be plotted over time, by name; nothing of an operation."""
    if record["kind"] == "transfers":
        return {f"transfer/{name}": value for name, value in record["figures"].items()}
    return dict(record["values"]) if record["kind"] in ("scalars", "step", "log") else {}


@runtime_checkable
class Sink(Protocol):
    """The whole protocol."""

    def write(self, records: Sequence[Record]) -> None:
        """Take some records, oldest first. They are shared with other sinks: do not change them."""

    def close(self) -> None:
        """Finish. Nothing is written afterwards."""


SinkSpec: TypeAlias = str | Mapping[str, Any] | Sink
"""A name, a mapping with ``kind`` and options, or a sink."""

_OURS = {
    "jsonl": "rlplane.sinks.jsonl:JsonlSink",
    "logging": "rlplane.sinks.log:LoggingSink",
    "otel": "rlplane.sinks.otel:OtelSink",
    "tensorboard": "rlplane.sinks.tensorboard:TensorBoardSink",
    "trace": "rlplane.sinks.trace:TraceSink",
    "wandb": "rlplane.sinks.wandb:WandbSink",
}


def sink_names() -> list[str]:
    """The kinds that can be configured here: ours, and those of installed packages."""
    return sorted({*_OURS, *(point.name for point in metadata.entry_points(group=SINK_GROUP))})


def build_sink(spec: SinkSpec) -> Sink:
    """Start the sink that ``spec`` describes.

    Raises:
        ConfigError: An unknown kind, options that it does not take, or it cannot start as configured.
        MissingExtraError: What it needs is not installed.
    """
    if isinstance(spec, str):
        kind, options = spec, {}
    elif isinstance(spec, Mapping):
        options = dict(spec)
        kind = options.pop("kind", None)
        if not isinstance(kind, str):
            raise ConfigError(f"a sink is a name or a mapping with 'kind', not {dict(spec)!r}")
    elif isinstance(spec, Sink):
        return spec
    else:
        raise ConfigError(f"a sink is a name, a mapping with 'kind', or has write and close; not {spec!r}")
    factory = _find(kind)
    try:
        sink = factory(**options)
    except TypeError as error:
        raise ConfigError(f"sink {kind!r} cannot start with the options {options!r}: {error}") from error
    except OSError as error:
        raise ConfigError(f"sink {kind!r} cannot start: {error}") from error
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the sink {kind!r} needs the package {error.name!r}, which is not installed:"
            f" pip install 'rlplane[{kind}]'"
        ) from error
    if not isinstance(sink, Sink):
        raise ConfigError(f"sink {kind!r} returned a {type(sink).__name__} without write and close")
    return sink


def describe_spec(spec: SinkSpec) -> str:
    """A short name for logs and snapshots."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Mapping):
        return " ".join(str(spec[key]) for key in ("kind", "path") if key in spec)
    return type(spec).__name__


def _find(kind: str) -> Any:
    if kind in _OURS:
        point = metadata.EntryPoint(name=kind, value=_OURS[kind], group=SINK_GROUP)
        return point.load()
    found = metadata.entry_points(group=SINK_GROUP, name=kind)
    if not found:
        raise ConfigError(f"there is no sink {kind!r}; there are {sink_names()}")
    point = next(iter(found))
    try:
        return point.load()
    except ImportError as error:
        raise MissingExtraError(
            f"the sink {kind!r} ({point.value}) is installed but cannot be imported: {error}"
        ) from error

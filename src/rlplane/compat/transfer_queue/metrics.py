"""``metrics.enabled: true`` in TransferQueue's config: what the plane holds, for Prometheus to scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlplane.compat.transfer_queue import calls
from rlplane.errors import DataPlaneError, MissingExtraError, PlaneConnectionError

if TYPE_CHECKING:
    from rlplane.compat.transfer_queue.session import Session

__all__ = ["MetricsServer"]

_HOST = "127.0.0.1"


class MetricsServer:
    """Serves ``/metrics`` on this machine; each scrape asks the plane."""

    def __init__(self, session: Session, port: int) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError(
                "metrics.enabled needs the package 'prometheus_client', which is not installed:"
                " pip install 'rlplane[prometheus]'"
            ) from error
        registry = prometheus_client.CollectorRegistry()
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, _HOST, registry)
        except OSError as error:
            raise PlaneConnectionError(f"cannot serve metrics on {_HOST}:{port}: {error.strerror}") from error
        self.endpoint = f"{_HOST}:{self._server.server_port}"
        registry.register(_Collector(session))

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Collector:
    def __init__(self, session: Session) -> None:
        self._session = session

    def describe(self) -> list[Any]:
        return []  # or it would be scraped when it is registered

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        samples = GaugeMetricFamily("rlplane_partition_samples", "Samples held.", labels=["partition"])
        held = GaugeMetricFamily("rlplane_partition_bytes", "Bytes held.", labels=["partition"])
        produced = GaugeMetricFamily(
            "rlplane_partition_field_samples", "Samples that have a field.", labels=["partition", "field"]
        )
        try:
            for partition in self._session.run(calls.list_partitions):
                status = self._session.engine.partition_status(partition)
                samples.add_metric([partition], status["samples"])
                held.add_metric([partition], status["bytes"])
                for name, field in status["fields"].items():
                    produced.add_metric([partition, name], field["produced"])
        except DataPlaneError:
            return  # a partition went meanwhile, or the plane: the next scrape sees what there is
        yield from (samples, held, produced)

"""``metrics.enabled: true`` in TransferQueue's config: what the plane holds, for Prometheus to scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlplane.compat.transfer_queue import calls
from rlplane.errors import DataPlaneError, MissingExtraError
from rlplane.sinks.metrics_http import MetricsHttpServer

if TYPE_CHECKING:
    from rlplane.compat.transfer_queue.session import Session


class MetricsServer:
    """Serves ``/metrics`` on this machine, without a token, as TransferQueue does. Scrapes ask the plane."""

    def __init__(self, session: Session, port: int) -> None:
        try:
            import prometheus_client
            import prometheus_client.exposition
        except ImportError as error:
            raise MissingExtraError(
                "metrics.enabled needs the package 'prometheus_client', which is not installed:"
                " pip install 'rlplane[prometheus]'"
            ) from error
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Collector(session))

        def render(accept: str) -> tuple[bytes, str]:
            encode, content_type = prometheus_client.exposition.choose_encoder(accept)
            return encode(registry), content_type

        self._server = MetricsHttpServer(port, render)
        self.endpoint = f"127.0.0.1:{self._server.port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


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

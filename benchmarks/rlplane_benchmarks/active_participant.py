"""A participant in a run, with the processes that it runs in."""

from __future__ import annotations

from typing import Any, Protocol

from rlplane_benchmarks.participants import Participant
from rlplane_benchmarks.read_checks import ReadChecks
from rlplane_benchmarks.worker_process import WorkerProcess

__all__ = ["ActiveParticipant", "WorkerActor"]


class ActiveParticipant:
    """A participant in a run: its worker processes, the checks of its reads, and why it failed, if it did."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.name = participant.name
        self._environment = participant.environment()
        self.producer = self._worker("producer")
        self.consumer: _AnyWorker = (
            WorkerActor(self.producer) if participant.consumer_is_actor else self._worker("consumer")
        )
        self.clients: WorkerProcess | None = None
        self.link: dict[str, Any] = {}
        self.reads = ReadChecks(self.name)
        self.failure: str | None = None

    def processes(self) -> list[WorkerProcess]:
        return [worker for worker in (self.producer, self.consumer) if isinstance(worker, WorkerProcess)]

    def await_load(self) -> None:
        for worker in self.processes():
            worker.receive()

    def open(self) -> None:
        self.link = self.producer.call("open", self.participant.store, "producer", {})
        if not self.participant.consumer_is_actor:
            self.consumer.call("open", self.participant.store, "consumer", self.link)

    def _worker(self, role: str) -> WorkerProcess:
        return WorkerProcess(f"{self.name} ({role})", self._environment)

    def start_clients(self, count: int, partition: str, rows: int) -> None:
        self.clients = self._worker("clients")
        self.clients.call("clients_start", self.participant.store, self.link, count, partition, rows)

    def register(self, partition: str) -> None:
        self.producer.call("register", partition)

    def forget(self) -> None:
        self.producer.call("forget")
        self.consumer.call("forget")

    def close(self) -> None:
        for worker in (self.clients, self.consumer, self.producer):
            if worker is not None:
                worker.close()


class _AnyWorker(Protocol):
    def call(self, command: str, *args: Any) -> Any: ...
    def send(self, command: str, *args: Any) -> None: ...
    def receive(self) -> Any: ...
    def close(self) -> None: ...


class WorkerActor:
    """A consumer that is a Ray actor, called through the producer that started it."""

    def __init__(self, producer: WorkerProcess) -> None:
        self._producer = producer

    def call(self, command: str, *args: Any) -> Any:
        self.send(command, *args)
        return self.receive()

    def send(self, command: str, *args: Any) -> None:
        self._producer.call("forward_send", command, args)

    def receive(self) -> Any:
        return self._producer.call("forward_receive")

    def close(self) -> None:
        """The actor ends with the producer."""

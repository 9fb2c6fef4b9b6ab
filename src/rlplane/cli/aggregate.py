"""``rlplane aggregate``: the aggregator by itself, for jobs that do not start their own."""

from __future__ import annotations

from pathlib import Path

from rlplane.cli.options import Flag


def aggregate(
    *,
    out: Path | None = None,
    run_id: str | None = None,
    events_address: str | None = None,
    snapshot_address: str | None = None,
    jsonl: Path | None = None,
    refresh_hz: float = 4.0,
    drain_timeout: float = 30.0,
    prometheus_port: int | None = None,
    token_file: Path | None = None,
    no_token: Flag = False,
    allow_remote: Flag = False,
) -> int:
    """Collect the events of a run, publish live snapshots, and leave an exact final one.

    It ends when the job says that the run has ended, or on SIGTERM; Ctrl-C is left to the job.

    Parameters
    ----------
    out
        The directory for final_snapshot.json.
    run_id
        The run's name. Default: made from the time.
    events_address
        Where workers send: the RLPLANE_METRICS_ADDRESS of the job. Default: a Unix socket.
    snapshot_address
        Where viewers subscribe. Default: a Unix socket that top and dash find by themselves.
    jsonl
        Write all events to this file, for rlplane trace.
    refresh_hz
        Snapshots per second.
    drain_timeout
        The longest drain at the end, in seconds; 0 for no limit.
    prometheus_port
        Serve /metrics on this port of 127.0.0.1, for whoever has the token.
    token_file
        A file with the token for /metrics. Default: RLPLANE_TOKEN, else a new one at each start.
    no_token
        Serve /metrics to every process and user of this machine.
    allow_remote
        Permit addresses that other machines can reach.
    """
    from rlplane.metrics.aggregator import main

    arguments = ["--refresh-hz", str(refresh_hz), "--drain-timeout", str(drain_timeout)]
    for option, value in (
        ("--out", out),
        ("--run-id", run_id),
        ("--events-address", events_address),
        ("--snapshot-address", snapshot_address),
        ("--jsonl", jsonl),
        ("--prometheus-port", prometheus_port),
        ("--token-file", token_file),
    ):
        if value is not None:
            arguments += [option, str(value)]
    return main([*arguments, *["--allow-remote"] * allow_remote, *["--no-token"] * no_token])

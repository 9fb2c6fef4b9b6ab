"""The work of ``rlplane doctor``, which has to run where the extra ``cli`` is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from rlplane.cli.outcome import ExitCode
from rlplane.cli.output import wants_colour, write_json, write_text

_EXTRAS = {
    "cli": "cyclopts",
    "tui": "textual",
    "web": "starlette",
    "prometheus": "prometheus_client",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "otel": "opentelemetry",
    "transfer-queue": "transfer_queue",
    "mooncake": "mooncake",
    "nixl": "nixl",
}
_COLOURS = {"ok": "32", "warning": "33", "problem": "31"}


def check_machine(*, clean: bool, as_json: bool) -> ExitCode:
    """Print what was found; ``FAILED`` if something would stop a plane."""
    from rlplane.storage.shm import doctor as local

    removed = [str(path) for path in local.clean()] if clean else []
    checks = local.inspect()
    installed = {extra: find_spec(module) is not None for extra, module in _EXTRAS.items()}
    if as_json:
        entries = [{"name": check.name, "status": check.status, "detail": check.detail} for check in checks]
        write_json("doctor", {"checks": entries, "removed": removed, "extras": installed})
    else:
        lines = [f"removed {path}" for path in removed]
        lines += [f"{_mark(check.status)}  {check.name}: {check.detail}" for check in checks]
        have = ", ".join(extra for extra, there in installed.items() if there) or "none"
        missing = ", ".join(extra for extra, there in installed.items() if not there)
        lines.append(f"{_mark('ok')}  extras: {have}" + (f"; not installed: {missing}" if missing else ""))
        write_text("\n".join(lines))
    return ExitCode.FAILED if any(check.status == "problem" for check in checks) else ExitCode.OK


def _mark(status: str) -> str:
    text = f"{status:<7}"
    return f"\033[{_COLOURS[status]}m{text}\033[0m" if wants_colour() else text

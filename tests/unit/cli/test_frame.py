"""The command line as a whole: how it ends, what it prints where, and which options it has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlplane.cli import CommandError, ExitCode, exit_code_for, run
from rlplane.cli.commands import COMMANDS, build_app
from rlplane.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    MissingExtraError,
    PlaneConnectionError,
)

OPTIONS = Path(__file__).with_name("options.json")


def rlplane(*arguments: str, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; ``code`` runs before it."""
    start = "from rlplane.cli import main; main()"
    command = [sys.executable, "-c", f"{code}\n{start}" if code else start, *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLPLANE_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=clean | environment
    )


def test_the_options_are_the_frozen_ones() -> None:
    """A new, renamed or removed option is a change of the interface: change ``options.json`` with it."""
    app = build_app()
    found = {
        name: sorted("/".join(argument.names) for argument in app[name].assemble_argument_collection())
        for name in COMMANDS
    }
    assert found == json.loads(OPTIONS.read_text())


def test_every_command_of_the_documentation_is_there() -> None:
    wanted = {"demo", "serve", "top", "dash", "report", "bench", "doctor", "trace", "config", "aggregate"}
    wanted |= {"stress"}
    assert set(COMMANDS) == wanted


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert f"Example: rlplane {name}" in text
    assert len(text.splitlines()) <= 60


def test_every_option_is_explained() -> None:
    app = build_app()
    for name in COMMANDS:
        for argument in app[name].assemble_argument_collection(parse_docstring=True):
            assert argument.parameter.help, f"{name} {argument.names}"


def test_help_for_the_whole_lists_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in COMMANDS)
    for meaning in ("0 fine", "2 usage or config", "3 cannot start", "4 failed", "130 interrupted"):
        assert meaning in text


def test_help_and_version_load_no_torch_and_no_viewer() -> None:
    code = (
        "import atexit, sys\n"
        "heavy = ('torch', 'textual', 'starlette', 'ray', 'numpy')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))"
    )
    done = rlplane("--version", code=code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", done.stdout.strip())


@pytest.mark.parametrize(
    "name", ["rlplane.tui.app", "rlplane.web.app", "rlplane.cli.top", "rlplane.cli.dash"]
)
def test_viewers_load_no_torch(name: str) -> None:
    code = f"import sys, {name}; assert 'torch' not in sys.modules and 'tensordict' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["nosuch"], 'Unknown command "nosuch"'),
        (["confg"], 'Did you mean "config"?'),
        (["config", "--chekc"], "Did you mean --check?"),
        (["trace"], "requires an argument"),
        (["aggregate", "--refresh-hz", "fast"], "fast"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.strip().splitlines()
    assert hint in first
    assert second.startswith("Try: rlplane ") and second.endswith("--help")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (InvalidRequestError("x"), 2),
        (MissingExtraError("x"), 3),
        (PlaneConnectionError("x"), 3),
        (CapacityError("x"), 4),
        (RuntimeError("x"), 4),
        (CommandError("x", ExitCode.CANNOT_START), 3),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_code_for(error) == code


def test_an_error_has_no_traceback_unless_it_is_asked_for() -> None:
    plain = rlplane("config", "nosuch.toml")
    assert (plain.returncode, plain.stdout) == (2, "")
    assert plain.stderr == "rlplane: cannot read the config nosuch.toml: No such file or directory\n"
    for shown in (
        rlplane("config", "--debug", "nosuch.toml"),
        rlplane("config", "nosuch.toml", RLPLANE_DEBUG="1"),
    ):
        assert "Traceback (most recent call last)" in shown.stderr
        assert shown.returncode == 1


def test_an_error_that_nobody_expected_is_one_line_too() -> None:
    done = rlplane("config", code="import rlplane.config\nrlplane.config.load_config = None")
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.count("\n") == 1 and "TypeError" in done.stderr and "--debug" in done.stderr


def test_without_cyclopts_the_extra_is_named() -> None:
    done = rlplane("config", code="import sys; sys.modules['cyclopts'] = None")
    assert done.returncode == ExitCode.CANNOT_START
    assert done.stderr == (
        "rlplane: the command line needs the package 'cyclopts', which is not installed:"
        " pip install 'rlplane[cli]'\n"
    )


NO_EXTRAS = (
    "import sys; sys.modules.update(dict.fromkeys(['cyclopts', 'rich', 'yaml', 'textual', 'starlette']))"
)


def test_version_and_doctor_work_without_extras() -> None:
    shown = rlplane("--version", code=NO_EXTRAS)
    assert (shown.returncode, shown.stdout) == (0, rlplane("--version").stdout)
    text = rlplane("doctor", code=NO_EXTRAS)
    assert text.returncode == ExitCode.OK, text.stderr
    assert "shared memory" in text.stdout
    assert {"cli", "tui", "web"} <= set(text.stdout.partition("not installed: ")[2].strip().split(", "))
    content = json.loads(rlplane("doctor", "--json", code=NO_EXTRAS).stdout)
    assert content["schema"] == "rlplane.doctor" and content["extras"]["cli"] is False
    assert "pip install 'rlplane[cli]'" in rlplane("doctor", "--nosuch", code=NO_EXTRAS).stderr


@pytest.mark.parametrize(
    ("command", "module", "extra"), [("top", "textual", "tui"), ("dash", "uvicorn", "web")]
)
def test_without_a_viewers_package_its_extra_is_named(command: str, module: str, extra: str) -> None:
    pretend = "sys.stdin.isatty = sys.stdout.isatty = lambda: True" if command == "top" else ""
    done = rlplane(command, code=f"import sys; sys.modules[{module!r}] = None\n{pretend}")
    assert done.returncode == ExitCode.CANNOT_START, done.stderr
    assert f"pip install 'rlplane[{extra}]'" in done.stderr


def test_ctrl_c_is_exit_code_130() -> None:
    code = (
        "import rlplane.cli.config, os, signal\n"
        "rlplane.cli.config.resolve_config = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    )
    done = rlplane("config", code=code)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_reader_that_has_gone_is_no_reason_to_complain() -> None:
    command = f"{sys.executable} -c 'from rlplane.cli import main; main()' config --json | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_log_level_that_does_not_exist_is_a_config_error() -> None:
    done = rlplane("config", RLPLANE_LOG_LEVEL="loud")
    assert done.returncode == ExitCode.USAGE
    assert "RLPLANE_LOG_LEVEL is 'LOUD'" in done.stderr


@pytest.mark.parametrize("arguments", [["config"], ["doctor"]])
def test_json_is_data_on_stdout_with_a_schema_version(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json"]) == ExitCode.OK
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert (content["schema"], content["schema_version"]) == (f"rlplane.{arguments[0]}", 1)
    assert captured.err == ""


def test_colour_is_for_terminals_and_not_where_no_color_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlplane.cli import output

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(output, "stdout_is_terminal", lambda: True)
    assert output.wants_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.wants_colour()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(output, "stdout_is_terminal", lambda: False)
    assert not output.wants_colour()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str) -> None:
    script = build_app().generate_completion(shell=shell)
    assert all(name in script for name in COMMANDS)


def test_bash_accepts_the_completion_script() -> None:
    script = build_app().generate_completion(shell="bash")
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

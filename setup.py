"""What pyproject.toml cannot say: the optional C loop, and the file that lets an environment variable decide
what ``import transfer_queue`` gives.

Python reads ``.pth`` files of site-packages when it starts, in workers that nobody calls install() in too.
Ours does nothing unless RLPLANE_AS_TRANSFER_QUEUE is set.
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

# A Python without the GIL has no stable interface yet.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")
STARTUP_FILE = "rlplane_as_transfer_queue.pth"
STARTUP = (
    'import os; os.environ.get("RLPLANE_AS_TRANSFER_QUEUE", "0") in ("", "0") or '
    '__import__("rlplane.compat.transfer_queue_import", fromlist=["install"]).install()\n'
)


class BuildWithStartupFile(build_py):
    """Puts the file beside the package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, STARTUP_FILE).write_text(STARTUP)

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, STARTUP_FILE))]


class WithStartupFile:
    """What setuptools does to make an editable install, and then the file."""

    def __init__(self, strategy):
        self.strategy = strategy

    def __enter__(self):
        self.strategy.__enter__()
        return self

    def __exit__(self, *error):
        return self.strategy.__exit__(*error)

    def __call__(self, wheel, files, mapping):
        self.strategy(wheel, files, mapping)
        wheel.writestr(STARTUP_FILE, STARTUP)


class EditableWithStartupFile(editable_wheel):
    """An editable install has no files of the package, but this one."""

    def _select_strategy(self, *args):
        return WithStartupFile(super()._select_strategy(*args))


setup(
    ext_modules=[
        Extension(
            "rlplane.storage._copy",
            ["src/rlplane/storage/_copy.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable else [],
            extra_compile_args=["-O2"],
            py_limited_api=stable,
            optional=True,  # without a compiler there is a slower way
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
    cmdclass={"build_py": BuildWithStartupFile, "editable_wheel": EditableWithStartupFile},
)

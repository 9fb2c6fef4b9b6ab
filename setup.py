"""The one part of the build that pyproject.toml cannot say yet without a warning: the optional C loop."""

import sysconfig

from setuptools import Extension, setup

# A Python without the GIL has no stable interface yet.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "rlplane.adapters.local._copy",
            ["src/rlplane/adapters/local/_copy.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable else [],
            extra_compile_args=["-O2"],
            py_limited_api=stable,
            optional=True,  # without a compiler there is a slower way
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
)

"""The one part of the build that pyproject.toml cannot say yet without a warning: the optional C loop."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "rlplane.adapters.local._copy",
            ["src/rlplane/adapters/local/_copy.c"],
            extra_compile_args=["-O2"],
            py_limited_api=True,
            optional=True,  # without a compiler there is a slower way
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

"""Asynchronous GRPO of a small transformer, with everything that moves going through the data plane.

Read in this order: ``task`` (what is learned), ``model`` and ``loss`` (plain torch), ``settings`` (the
flows), ``stages`` (the rollout and log-prob workers), ``trainer``. ``rlplane demo`` starts them, as threads,
processes or Ray actors, and watches them.
"""

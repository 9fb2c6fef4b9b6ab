"""Runnable examples of rlplane. ``rlplane_examples.grpo`` is the job that ``rlplane demo`` runs."""

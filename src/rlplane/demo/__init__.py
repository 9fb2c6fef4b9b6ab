"""The job that ``rlplane demo`` runs: asynchronous GRPO of a small transformer through the data plane.

The stages use the public API only, and can be copied from. Read them in this order:

    problem.py    what is learned: writing a short string backwards
    model.py      the transformer, in plain torch
    loss.py       the GRPO loss, in plain torch
    settings.py   the sizes of a run, its partitions and fields, and how a stage claims groups
    stages.py     the rollout worker and the log-prob worker
    trainer.py    the trainer

What runs them and shows the run:

    workers.py    a stage as a thread, a process or a Ray actor
    progress.py   the workers' reports to the job
    job.py        one run from start to end: starts the workers, replaces the dead ones, checks every sample
    display.py    the terminal while it runs
    results.py    the files in the run's directory when it has ended
    redirect.py   keeps what libraries print out of the display and of the JSON
"""

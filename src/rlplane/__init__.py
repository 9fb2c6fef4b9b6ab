"""rlplane: the data plane for RL post-training of language models."""

"""Other people's interfaces to a data plane, on our engines: their programs run unchanged."""

"""The pytest plugin: ``pytest --data-plane mypkg:make_client``."""

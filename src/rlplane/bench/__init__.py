"""Measurements behind ``rlplane bench``: each module measures one part and returns plain numbers."""

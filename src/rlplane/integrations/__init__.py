"""Plug-ins that put a plane into other people's trainers."""

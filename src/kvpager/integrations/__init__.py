"""kvpager inside other engines: one folder for each."""

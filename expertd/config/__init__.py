"""Settings: defaults < file < environment < flags, each value with its origin.

`schema` says what there is, `values` how it is written, `load` lays the sources over each other, `paths` finds files
and directories, `document` writes the commented file. What a setting does lies with the floor that takes it.
"""

from expertd.config.load import Config, load_config
from expertd.config.paths import Places, read_keys, sockets_to_try
from expertd.config.values import resolve_budget

__all__ = ["Config", "Places", "load_config", "read_keys", "resolve_budget", "sockets_to_try"]

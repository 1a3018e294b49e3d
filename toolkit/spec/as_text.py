"""YAML that a recipe is written in."""

import re
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what OmegaConf reads as a number, such as `1e-4`, or a commit `41e6407`.

    To YAML 1.1, which asks for a point and a sign, it is text.
    """


_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def to_yaml(value: Any, **form: Any) -> str:
    """A value as YAML that is read back as that value; `form` as of `yaml.dump`.

    Raises:
        yaml.YAMLError: there is no form for it.
    """
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **{"allow_unicode": True, **form}))

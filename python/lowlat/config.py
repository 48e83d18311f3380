"""What the server was asked for, as the guard takes it: SGLang's resolved settings and its model
configuration, under the names of the published ``config.json``.
"""

import json
from typing import Any

from lowlat import _dispatch

# SGLang moves the published rope_theta and rope_scaling into one field of this name.
ROPE_FIELD = "rope_parameters"


def requirements(isa: str) -> dict[str, dict[str, Any]]:
    """What the kernels of one machine code need, by the model_type that they are for."""
    specs = json.loads(_dispatch.requirements())
    return {spec["model_type"]: spec for spec in specs if isa in spec["isas"]}


def amd_isas() -> list[str]:
    """The AMD machine codes that there are kernels for."""
    specs = json.loads(_dispatch.requirements())
    return list(
        dict.fromkeys(isa for spec in specs for isa in spec["isas"] if isa.startswith("gfx"))
    )


def published(hf_config: Any) -> str:
    """The model's configuration as JSON text, as published."""
    fields = hf_config.to_dict()
    rope = dict(fields.get(ROPE_FIELD) or {})
    if "rope_theta" not in fields and "rope_theta" in rope:
        fields["rope_theta"] = rope.pop("rope_theta")
    if rope:
        fields["rope_scaling"] = rope
    # A checkpoint that is not quantised has no such field, and is none that the kernels read.
    fields["quantization_config"] = fields.get("quantization_config") or {"quant_method": "none"}
    return json.dumps(fields, default=str)


def options(cfg: Any, envs: Any, features: list[str], *, isa: str) -> dict[str, Any]:
    """SGLang's resolved settings `cfg` and environment `envs`, as options of the guard."""
    server_args: dict[str, Any] = {}
    env: dict[str, Any] = {}
    for spec in requirements(isa).values():
        for setting in spec["server_args"]:
            server_args[setting["name"]] = getattr(cfg, setting["name"])
        for setting in spec["env"]:
            env[setting["name"]] = getattr(envs, setting["name"]).get()
    return {
        "isa": isa,
        "tp_size": cfg.tp_size,
        "server_args": {name: value for name, value in server_args.items() if value is not None},
        "env": {name: value for name, value in env.items() if value is not None},
        "features": features,
    }

"""The whole models by `kind` of ``lowlat_model_config``."""

from oracle.model_v4 import ModelV4
from oracle.model_v41 import ModelV41

BY_KIND = {1: ModelV41, 2: ModelV4}


def make_model(config, weights, tp_size=1):
    return BY_KIND[config["kind"]](config, weights, tp_size)

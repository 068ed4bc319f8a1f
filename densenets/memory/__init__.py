"""Will it fit? Memory measured, predicted and planned."""

from densenets.memory.measuring import Measurement, allocated, allocated_peak, measure, watch_xla
from densenets.memory.planning import Fit, Plan, deepest, in_words, parse_bytes, plan
from densenets.memory.prediction import Moment, Prediction, predict

__all__ = [
    "Fit",
    "Measurement",
    "Moment",
    "Plan",
    "Prediction",
    "allocated",
    "allocated_peak",
    "deepest",
    "in_words",
    "measure",
    "parse_bytes",
    "plan",
    "predict",
    "watch_xla",
]

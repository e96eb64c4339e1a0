"""Hugging Face folders in and out: config.json, and safetensors one tensor at a time."""

from phalanx.model.hf.config import HfError, config_from_hf, config_to_hf
from phalanx.model.hf.exchange import INDEX_FILE, export_hf, load_hf

__all__ = ["INDEX_FILE", "HfError", "config_from_hf", "config_to_hf", "export_hf", "load_hf"]
